#!lua name=starling_timelines_v1

-- Timeline lists, changed atomically. The contract is mesh/timelines/port.py; the specification, to which a
-- property test holds this file, is tests/timelines_reference.py.
--
-- A list holds decimal ids, strictly descending, then, last, its tail record
--     state:floor:version:token:lease_until_ms
-- so what doesn't begin with a digit is a record. Ids, floors and times are compared as text, never as numbers:
-- Lua's numbers are doubles and would merge neighbours above 2^53.
--
-- Arguments named `ids` are strictly ascending; the Python side sorts them, and a call that breaks this is
-- refused. No function takes a list's last element away before it has put another one there: a list that
-- is empty for a moment is gone, and its TTL with it.
--
-- Functions keep their names and meaning for ever; what changes gets a new name (..._v2), because old and
-- new releases share a server during a roll-out.

local ELEMENTS_PER_CALL = 512 -- unpack() puts them on Lua's stack, which has room for some thousands.

-- Decimal numbers without leading zeros: the longer one is larger.
local function less(a, b)
  if #a ~= #b then
    return #a < #b
  end
  return a < b
end

local function is_id(element)
  local first = string.byte(element)
  return first and first >= 48 and first <= 57
end

local function is_canonical(number)
  return #number <= 20 and (number == '0' or string.byte(number) ~= 48)
end

-- nil for what this release doesn't know. Accepts exactly what parse_record in valkey.py accepts: else a
-- list could be unreadable there and in the way of a new life here.
local function parse(text)
  local state, floor, version, token, lease = string.match(text, '^(%l+):(%d+):(%d+):([%w_%-]+):(%d+)$')
  local known = (state == 'building' or state == 'ready')
    and is_canonical(floor)
    and is_canonical(version)
    and is_canonical(lease)
    and #token <= 64
  if not known then
    return nil
  end
  return { state = state, floor = floor, version = version, token = token, lease = lease }
end

local function render(record)
  return table.concat({ record.state, record.floor, record.version, record.token, record.lease }, ':')
end

local function read_record(key)
  local text = redis.call('LINDEX', key, -1)
  return text and parse(text)
end

local function are_ascending(args, first)
  for i = first + 1, #args do
    if not less(args[i - 1], args[i]) then
      return false
    end
  end
  return true
end

local NOT_ASCENDING = 'ERR starling_timelines_v1: ids must be strictly ascending'

-- Keep the `cap` newest; they are exact down to the smallest of them. A list whose record is unknown must
-- not grow for ever either, and can't be given a floor: it goes, and a reader will build it again.
local function trim(key, cap)
  local record = read_record(key)
  if not record then
    redis.call('DEL', key)
    return
  end
  redis.call('LTRIM', key, 0, cap - 1)
  record.floor = redis.call('LINDEX', key, -1)
  redis.call('RPUSH', key, render(record))
end

-- The element before which `id` belongs, the first smaller one (the record is smaller than all); nil if `id`
-- is there. The head must be larger. Gallops from the head, where late and repeated ids belong, then halves:
-- LPOS would look at every entry to learn that an id is new.
local function find_place(key, id)
  local above, below, place = 0, nil, nil
  local probe = 1
  while not below or below - above > 1 do
    local element = redis.call('LINDEX', key, probe)
    if element == id then
      return nil
    end
    if element and is_id(element) and less(id, element) then
      above = probe
    else
      below, place = probe, element
    end
    probe = below and math.floor((above + below) / 2) or 2 * probe
  end
  return place
end

-- One id that isn't newer than the head. Gives the new length, or nil where nothing was to be done.
local function insert_below(key, id, head, floor)
  if id == head or less(id, floor) then
    return nil
  end
  local place = find_place(key, id)
  return place and redis.call('LINSERT', key, 'BEFORE', place, id)
end

-- The ids (args[first] and on) that aren't newer than the head, in an existing list whose head is `head`.
-- Gives the index of the first newer one and the list's length if it changed, or nil for an unknown record.
local function push_late(key, head, args, first)
  local record = read_record(key)
  if not record then
    return nil
  end
  local i, length = first, nil
  if is_id(head) then
    while i <= #args and not less(head, args[i]) do
      length = insert_below(key, args[i], head, record.floor) or length
      i = i + 1
    end
  else -- The list holds no ids.
    while i <= #args and less(args[i], record.floor) do
      i = i + 1
    end
  end
  return i, length
end

-- Two calls where all ids are newer than the head, which is nearly always. The record isn't read then: the
-- head is at or above the floor, so the ids are. 1 if the list exists (and, if read, has a known record).
local function push_into(key, args, first, cap, slack)
  local call = redis.call
  local head = call('LINDEX', key, 0)
  if not head then
    return 0
  end
  local newer, length = first, nil
  if first <= #args and not (is_id(head) and less(head, args[first])) then
    newer, length = push_late(key, head, args, first)
    if not newer then
      return 0
    end
  end
  if newer <= #args then
    length = call('LPUSH', key, unpack(args, newer))
  end
  if length and length - 1 > cap + slack then
    trim(key, cap)
  end
  return 1
end

-- KEYS: lists. ARGV: cap, slack, ids... (few: see _IDS_PER_CALL_MAX in valkey.py). Gives how many exist.
local function push(keys, args)
  local cap, slack, first = tonumber(args[1]), tonumber(args[2]), 3
  if not are_ascending(args, first) then
    return redis.error_reply(NOT_ASCENDING)
  end
  local existing = 0
  for _, key in ipairs(keys) do
    existing = existing + push_into(key, args, first, cap, slack)
  end
  return existing
end

-- KEYS: list. ARGV: token, lease_until_ms, now_ms (the caller's clock), ttl_seconds. Gives 1 for a new life.
local function create(keys, args)
  local key = keys[1]
  local token, lease_until, now, ttl = args[1], args[2], args[3], args[4]
  local record = read_record(key)
  if record and (record.state == 'ready' or less(now, record.lease)) then
    return 0
  end
  redis.call('DEL', key)
  local life = { state = 'building', floor = '0', version = '0', token = token, lease = lease_until }
  redis.call('RPUSH', key, render(life))
  redis.call('EXPIRE', key, ttl)
  return 1
end

-- The union of `entries` (descending, then a record) and args[first] and on (ascending), down to the floor
-- and no more than `cap`. Gives the ids kept, descending, and the floor, which a cut raises.
local function union(entries, args, first, floor, cap)
  local kept, i, j = {}, 1, #args
  while true do
    local entry = i < #entries and entries[i] or nil
    local id = j >= first and args[j] or nil
    local newest
    if entry and not (id and less(entry, id)) then
      newest = entry
    else
      newest = id
    end
    if not newest or less(newest, floor) then
      return kept, floor
    end
    if #kept == cap then
      return kept, kept[cap]
    end
    kept[#kept + 1] = newest
    if entry == newest then
      i = i + 1
    end
    if id == newest then
      j = j - 1
    end
  end
end

-- Take ids into a list, whose record is otherwise as given: the new content goes behind the old, which then goes.
local function take_in(key, record, down_to, cap, args, first)
  local old = redis.call('LRANGE', key, 0, -1)
  local floor = less(record.floor, down_to) and down_to or record.floor
  local content
  content, record.floor = union(old, args, first, floor, cap)
  content[#content + 1] = render(record)
  for from = 1, #content, ELEMENTS_PER_CALL do
    redis.call('RPUSH', key, unpack(content, from, math.min(from + ELEMENTS_PER_CALL - 1, #content)))
  end
  redis.call('LTRIM', key, #old, -1)
end

-- KEYS: list. ARGV: token, version, down_to, cap, ids... Gives 1 if it was BUILDING with that token.
local function finish(keys, args)
  local key, first = keys[1], 5
  local token, version, down_to, cap = args[1], args[2], args[3], tonumber(args[4])
  if not are_ascending(args, first) then
    return redis.error_reply(NOT_ASCENDING)
  end
  local record = read_record(key)
  if not record or record.state ~= 'building' or record.token ~= token then
    return 0
  end
  record.state, record.version, record.lease = 'ready', version, '0'
  take_in(key, record, down_to, cap, args, first)
  return 1
end

-- KEYS: list. ARGV: token, from_version, to_version, down_to, cap, ids... Gives 1 if it was READY with that
-- token and from_version.
local function cover(keys, args)
  local key, first = keys[1], 6
  local token, from_version, to_version = args[1], args[2], args[3]
  local down_to, cap = args[4], tonumber(args[5])
  if not are_ascending(args, first) then
    return redis.error_reply(NOT_ASCENDING)
  end
  local record = read_record(key)
  if not record or record.state ~= 'ready' or record.token ~= token or record.version ~= from_version then
    return 0
  end
  record.version = to_version
  take_in(key, record, down_to, cap, args, first)
  return 1
end

-- KEYS: lists. ARGV: down_to, cap, ids... Repairs lists in any state; gives how many exist.
local function merge(keys, args)
  local down_to, cap, first = args[1], tonumber(args[2]), 3
  if not are_ascending(args, first) then
    return redis.error_reply(NOT_ASCENDING)
  end
  local existing = 0
  for _, key in ipairs(keys) do
    local record = read_record(key)
    if record then
      take_in(key, record, down_to, cap, args, first)
      existing = existing + 1
    end
  end
  return existing
end

-- KEYS: lists. Gives for each that is ready an id that no entry is above, its newest or else its floor, and for the
-- others an empty string.
local function bounds(keys)
  local found = {}
  for i, key in ipairs(keys) do
    local record = read_record(key)
    local head = record and record.state == 'ready' and redis.call('LINDEX', key, 0)
    found[i] = head and (is_id(head) and head or record.floor) or ''
  end
  return found
end

redis.register_function('timeline_push_v1', push)
redis.register_function('timeline_create_v1', create)
redis.register_function('timeline_finish_v1', finish)
redis.register_function('timeline_cover_v1', cover)
redis.register_function('timeline_merge_v1', merge)
redis.register_function('timeline_bounds_v1', bounds)
