#!lua name=starling_caches_v1

-- A body is "<version>:<bytes>", the bytes empty for a deleted tweet. The highest version wins, so that a slow
-- reader can't bring an old one back.
local function put_body(keys, args)
  local known = redis.call('GET', keys[1])
  if known and tonumber(known:match('^(%d+):')) >= tonumber(args[1]) then
    return 0
  end
  redis.call('SET', keys[1], args[1] .. ':' .. args[2], 'EX', args[3])
  return 1
end

-- A viewer's version is "v:<run_id>:<version>" or, while a reader fetches it, "lease:<token>". A copy of another
-- run_id was restored after a crash that may have lost its deletion: as good as none.
local function lease_version(keys, args)
  local known = redis.call('GET', keys[1])
  local copy_of = known and known:match('^v:([^:]*):')
  if known and (not copy_of or copy_of == args[2]) then
    return 0
  end
  redis.call('SET', keys[1], 'lease:' .. args[1], 'PX', args[3])
  return 1
end

local function fill_version(keys, args)
  if redis.call('GET', keys[1]) ~= 'lease:' .. args[1] then
    return 0
  end
  redis.call('SET', keys[1], 'v:' .. args[2] .. ':' .. args[3], 'EX', args[4])
  return 1
end

-- A tweet's counts are "<likes>:<retweets>:<replies>:<quotes>". Changes wait in the hash `pending`, "<tweet>:<number of
-- the count, from 1>" to the change. `taken` holds, of the same form, what a flush has taken; its field `flush` is the
-- flush's id, and "done:<id>" when it is over: so it differs whenever a flush has begun or ended.
local function add_counts(keys, args)
  for i = 2, #keys do
    local tweet, number, change = args[3 * i - 5], tonumber(args[3 * i - 4]), args[3 * i - 3]
    local field = tweet .. ':' .. number
    if redis.call('HINCRBY', keys[1], field, change) == 0 then
      redis.call('HDEL', keys[1], field)
    end
    local cached = redis.call('GET', keys[i])
    if cached then
      local counts = {}
      for count in cached:gmatch('[^:]+') do
        counts[#counts + 1] = count
      end
      counts[number] = string.format('%.0f', counts[number] + change)
      redis.call('SET', keys[i], table.concat(counts, ':'), 'KEEPTTL')
    end
  end
  return 1
end

local function take_counts(keys, args)
  local flush = redis.call('HGET', keys[2], 'flush')
  if not flush or flush:find('^done:') then
    local some = redis.call('HRANDFIELD', keys[1], args[2], 'WITHVALUES')
    if #some == 0 then
      return {}
    end
    local fields = {}
    for i = 1, #some, 2 do
      fields[#fields + 1] = some[i]
    end
    redis.call('HDEL', keys[1], unpack(fields))
    redis.call('DEL', keys[2])
    redis.call('HSET', keys[2], 'flush', args[1], unpack(some))
  end
  return redis.call('HGETALL', keys[2])
end

local function finish_counts(keys, args)
  if redis.call('HGET', keys[1], 'flush') ~= args[1] then
    return 0
  end
  redis.call('DEL', keys[1])
  redis.call('HSET', keys[1], 'flush', 'done:' .. args[1])
  return 1
end

local function fill_counts(keys, args)
  if (redis.call('HGET', keys[2], 'flush') or '') ~= args[1] then
    return {}
  end
  local filled = {}
  for i = 3, #keys do
    local at = 5 * i - 11
    local fields = {}
    for number = 1, 4 do
      fields[number] = args[at] .. ':' .. number
    end
    local pending = redis.call('HMGET', keys[1], unpack(fields))
    local taken = args[2] == '1' and {} or redis.call('HMGET', keys[2], unpack(fields))
    local counts = {}
    for number = 1, 4 do
      local count = args[at + number] + (pending[number] or 0) + (taken[number] or 0)
      counts[number] = string.format('%.0f', count)
    end
    filled[#filled + 1] = table.concat(counts, ':')
    redis.call('SET', keys[i], filled[#filled], 'EX', args[3])
  end
  return filled
end

-- How often something happened of late: a hash of short buckets of time, by number, and `over`, when the sum of the
-- last buckets was last at or over the bar (ms). Returns the sum, these times included, and `over` as it was before.
local function hit(keys, args)
  local now, bucket_ms, buckets, bar = tonumber(args[1]), tonumber(args[2]), tonumber(args[3]), tonumber(args[4])
  local bucket = math.floor(now / bucket_ms)
  redis.call('HINCRBY', keys[1], string.format('%.0f', bucket), args[6])
  local hits, over = 0, 0
  local fields = redis.call('HGETALL', keys[1])
  for i = 1, #fields, 2 do
    local value = tonumber(fields[i + 1])
    if fields[i] == 'over' then
      over = value
    elseif tonumber(fields[i]) > bucket - buckets then
      hits = hits + value
    else
      redis.call('HDEL', keys[1], fields[i])
    end
  end
  if hits >= bar then
    redis.call('HSET', keys[1], 'over', args[1])
  end
  redis.call('PEXPIRE', keys[1], args[5])
  return { hits, over }
end

redis.register_function('cache_put_body_v1', put_body)
redis.register_function('cache_lease_version_v1', lease_version)
redis.register_function('cache_fill_version_v1', fill_version)
redis.register_function('cache_add_counts_v1', add_counts)
redis.register_function('cache_take_counts_v1', take_counts)
redis.register_function('cache_finish_counts_v1', finish_counts)
redis.register_function('cache_fill_counts_v1', fill_counts)
redis.register_function('cache_hit_v1', hit)
