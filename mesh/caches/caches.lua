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

redis.register_function('cache_put_body_v1', put_body)
redis.register_function('cache_lease_version_v1', lease_version)
redis.register_function('cache_fill_version_v1', fill_version)
