#!lua name=starling_eventlog_v1

-- The event log's streams: one key, one stream, one partition (its Python side is valkey_streams.py).
--
-- A record's id is <ms>-<n>: the server's time when it was appended (never below the record's before), and
-- its ordinal in the partition. So the number of records between two ids is a subtraction, exact after any
-- trimming and rewinding; the server's own count (XINFO GROUPS, lag) is nil after a rewind.
--
-- A group's backlog is what lies above its last delivered id, and what is pending. After a rewind a record
-- may be both.
--
-- Names end in their version; a change of meaning takes a new name, so that releases live side by side.
-- 'allow-oom': what frees memory, or is bounded and small, must go on when memory is short. Append may not.

local PAGE = 1000

-- Who owns, in each group, what its members gave back when they left: taken first, without any claim time.
local RELEASED = '-'

local function fields(flat)
  local map = {}
  for i = 1, #flat, 2 do
    map[flat[i]] = flat[i + 1]
  end
  return map
end

local function parse(id)
  local ms, n = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(n)
end

local function less(a, b)
  local a_ms, a_n = parse(a)
  local b_ms, b_n = parse(b)
  return a_ms < b_ms or (a_ms == b_ms and a_n < b_n)
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Groups by name; none where the stream doesn't exist.
local function groups_of(key)
  local groups = {}
  if redis.call('EXISTS', key) == 1 then
    for _, flat in ipairs(redis.call('XINFO', 'GROUPS', key)) do
      local group = fields(flat)
      groups[group['name']] = group
    end
  end
  return groups
end

local function oldest_pending(key, group)
  local first = redis.call('XPENDING', key, group, '-', '+', 1)[1]
  return first and first[1]
end

-- Makes pending records the consumer's, as handed out just now. (unpack() must come last: anywhere else it
-- gives its first value only.)
local function own(key, group, consumer, ids)
  if #ids > 0 then
    local claim = { 'XCLAIM', key, group, consumer, 0, unpack(ids) }
    table.insert(claim, 'JUSTID')
    redis.call(unpack(claim))
  end
end

local function group_exists(key, group)
  local reply = redis.pcall('XPENDING', key, group, '-', '+', 1, RELEASED)
  if reply.err and string.sub(reply.err, 1, 7) ~= 'NOGROUP' then
    error(reply)
  end
  return not reply.err
end

-- Creates the group, and the stream, from the first record on; true if it wasn't there.
local function ensure_group(key, group)
  if group_exists(key, group) then
    return false
  end
  redis.call('XGROUP', 'CREATE', key, group, '0', 'MKSTREAM')
  return true
end

-- Trims the oldest `excess` records if every group has acknowledged them, and says whether it did. Without a
-- group nothing counts as acknowledged: the one that will come must find everything.
local function trim_acknowledged(key, excess)
  local last -- an XRANGE bound: the end of what all groups are done with
  for name, group in pairs(groups_of(key)) do
    local id, bound = group['last-delivered-id'], group['last-delivered-id']
    local pending = oldest_pending(key, name)
    if pending and not less(id, pending) then
      id, bound = pending, '(' .. pending
    end
    if not last or less(id, last.id) or (id == last.id and bound ~= id) then
      last = { id = id, bound = bound }
    end
  end
  if not last or #redis.call('XRANGE', key, '-', last.bound, 'COUNT', excess) < excess then
    return false
  end
  redis.call('XTRIM', key, 'MAXLEN', '=', redis.call('XLEN', key) - excess)
  return true
end

local function last_id(key)
  local last = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  if last then
    return last[1]
  end
  if redis.call('EXISTS', key) == 1 then
    return fields(redis.call('XINFO', 'STREAM', key))['last-generated-id']
  end
  return '0-0'
end

-- Appends ARGV[from], ARGV[from + 1] (key, value), and so on.
local function append(key, args, from)
  local ms, n = parse(last_id(key))
  ms = math.max(ms, now_ms())
  for i = from, #args, 2 do
    n = n + 1
    redis.call('XADD', key, string.format('%.0f-%.0f', ms, n), 'k', args[i], 'v', args[i + 1])
  end
end

-- append(stream; records_max, key, value, …) → 1, or 0: full, and nothing was appended.
local function append_bounded(keys, args)
  local key, added = keys[1], (#args - 1) / 2
  local excess = redis.call('XLEN', key) + added - tonumber(args[1])
  if excess > 0 and not trim_acknowledged(key, excess) then
    return 0
  end
  append(key, args, 2)
  return 1
end

-- Collects what one call hands out: at most `room` records.
local function new_hand(room)
  local hand = { room = room, records = {} }
  function hand.add(index, entries, redelivered)
    for _, entry in ipairs(entries) do
      hand.room = hand.room - 1
      table.insert(hand.records, { index, entry[1], entry[2][2], entry[2][4], redelivered })
    end
  end
  return hand
end

-- Adds those that were taken over, but for what a rewind has put among the undelivered: that comes from there.
local function add_taken_over(hand, index, key, group, entries)
  local delivered = #entries > 0 and groups_of(key)[group]['last-delivered-id']
  local handed = {}
  for _, entry in ipairs(entries) do
    if not less(delivered, entry[1]) then
      table.insert(handed, entry)
    end
  end
  hand.add(index, handed, 1)
end

-- What has been idle for the claim time. → the cursor to go on from, '' at the end of the pass.
local function take_idle(hand, index, key, group, consumer, idle_ms, cursor)
  local reply = redis.call('XAUTOCLAIM', key, group, consumer, idle_ms, cursor, 'COUNT', hand.room)
  add_taken_over(hand, index, key, group, reply[2])
  return reply[1] == '0-0' and '' or reply[1]
end

-- What members gave back.
local function take_released(hand, index, key, group, consumer)
  local ids = {}
  for i, pending in ipairs(redis.call('XPENDING', key, group, '-', '+', hand.room, RELEASED)) do
    ids[i] = pending[1]
  end
  if #ids > 0 then
    add_taken_over(hand, index, key, group, redis.call('XCLAIM', key, group, consumer, 0, unpack(ids)))
  end
end

-- What is new. → whether there may be more.
local function take_new(hand, index, key, group, consumer, count)
  local reply =
    redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', count, 'STREAMS', key, '>')
  local entries = reply and reply[1][2] or {}
  hand.add(index, entries, 0)
  return #entries == count
end

-- take(streams…; group, consumer, count, first, idle_ms, cursors…) → {cursors…}, {{index, id, key, value,
-- redelivered}…}. `first`: the stream to begin with. A cursor of '' leaves that stream's idle records alone.
local function take(keys, args)
  local group, consumer, first, idle_ms = args[1], args[2], tonumber(args[4]), args[5]
  local hand, cursors, order = new_hand(tonumber(args[3])), {}, {}
  for i = 1, #keys do
    order[i] = (first + i - 1) % #keys + 1
    cursors[i] = args[5 + i]
  end
  for _, i in ipairs(order) do
    ensure_group(keys[i], group)
    if hand.room > 0 and cursors[i] ~= '' then
      cursors[i] = take_idle(hand, i, keys[i], group, consumer, idle_ms, cursors[i])
    end
    if hand.room > 0 then
      take_released(hand, i, keys[i], group, consumer)
    end
  end
  -- An equal share for each first, then what is left of the room for those that have more.
  local share, hungry = math.max(1, math.floor(hand.room / #keys)), {}
  for _, i in ipairs(order) do
    if hand.room > 0 and take_new(hand, i, keys[i], group, consumer, math.min(share, hand.room)) then
      table.insert(hungry, i)
    end
  end
  for _, i in ipairs(hungry) do
    if hand.room > 0 then
      take_new(hand, i, keys[i], group, consumer, hand.room)
    end
  end
  return { cursors, hand.records }
end

-- renew(stream; group, consumer, ids…): resets their idle time, where they are still the consumer's own.
local function renew(keys, args)
  local key, group, consumer = keys[1], args[1], args[2]
  if not group_exists(key, group) then
    return 0
  end
  local ids = {}
  for i = 3, #args do
    if #redis.call('XPENDING', key, group, args[i], args[i], 1, consumer) > 0 then
      table.insert(ids, args[i])
    end
  end
  own(key, group, consumer, ids)
  return #ids
end

-- dead_letter(stream, dead_letters; group, id, records_max, key, value): moves a record, once: one that isn't
-- pending any more was moved before, or done by another member.
local function dead_letter(keys, args)
  local moved = redis.call('XACK', keys[1], args[1], args[2])
  if moved == 1 then
    append(keys[2], args, 4)
    redis.call('XTRIM', keys[2], 'MAXLEN', '~', args[3])
  end
  return moved
end

-- rewind(stream; group, since_ms): hands out again from there on. Never forwards: that would skip records.
local function rewind(keys, args)
  local key, group, since_ms = keys[1], args[1], tonumber(args[2])
  if ensure_group(key, group) then
    return
  end
  local before = since_ms == 0 and '0-0' or string.format('%.0f-18446744073709551615', since_ms - 1)
  if less(before, groups_of(key)[group]['last-delivered-id']) then
    redis.call('XGROUP', 'SETID', key, group, before)
  end
end

-- Number of pending records of the group at or below `id`: those above count as undelivered.
local function pending_up_to(key, group, id)
  if #redis.call('XPENDING', key, group, '(' .. id, '+', 1) == 0 then
    return redis.call('XPENDING', key, group)[1]
  end
  local count, from = 0, '-'
  repeat
    local page = redis.call('XPENDING', key, group, from, id, PAGE)
    count = count + #page
    from = #page > 0 and '(' .. page[#page][1]
  until #page < PAGE
  return count
end

-- lag(stream; group) → backlog in records, and the age of its oldest in ms.
local function lag(keys, args)
  local key, group = keys[1], args[1]
  local info = groups_of(key)[group]
  local delivered = info and info['last-delivered-id'] or '0-0'
  local count = info and pending_up_to(key, group, delivered) or 0
  local oldest = count > 0 and oldest_pending(key, group)
  local undelivered = redis.call('XRANGE', key, '(' .. delivered, '+', 'COUNT', 1)[1]
  if undelivered then
    local _, first = parse(undelivered[1])
    local _, last = parse(last_id(key))
    count = count + last - first + 1
    oldest = oldest and less(oldest, undelivered[1]) and oldest or undelivered[1]
  end
  return { count, oldest and math.max(0, now_ms() - parse(oldest)) or 0 }
end

-- release(stream; group, consumer): gives back all that the consumer holds, and forgets it. Deleting it
-- before would drop what it holds from the group: lost.
local function release(keys, args)
  local key, group, consumer = keys[1], args[1], args[2]
  if not group_exists(key, group) then
    return
  end
  repeat
    local page = redis.call('XPENDING', key, group, '-', '+', PAGE, consumer)
    local ids = {}
    for i, pending in ipairs(page) do
      ids[i] = pending[1]
    end
    own(key, group, RELEASED, ids)
  until #page < PAGE
  if #redis.call('XPENDING', key, group, '-', '+', 1, consumer) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', key, group, consumer)
  end
end

-- forget(stream; group, idle_ms): drops members that hold nothing and haven't been seen for so long. One that
-- lives after all comes back by its next read.
local function forget(keys, args)
  local key, group, idle_ms = keys[1], args[1], tonumber(args[2])
  if not group_exists(key, group) then
    return
  end
  for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', key, group)) do
    local member = fields(flat)
    if member['name'] ~= RELEASED and member['pending'] == 0 and member['idle'] >= idle_ms then
      redis.call('XGROUP', 'DELCONSUMER', key, group, member['name'])
    end
  end
end

local function register(name, callback, flags)
  redis.register_function({ function_name = name, callback = callback, flags = flags })
end

register('starling_eventlog_append_v1', append_bounded, {})
register('starling_eventlog_take_v1', take, { 'allow-oom' })
register('starling_eventlog_renew_v1', renew, { 'allow-oom' })
register('starling_eventlog_dead_letter_v1', dead_letter, { 'allow-oom' })
register('starling_eventlog_rewind_v1', rewind, { 'allow-oom' })
register('starling_eventlog_lag_v1', lag, { 'no-writes' })
register('starling_eventlog_release_v1', release, { 'allow-oom' })
register('starling_eventlog_forget_v1', forget, { 'allow-oom' })
