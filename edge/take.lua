-- A token bucket as one number (GCRA, the generic cell rate algorithm): when it will be full again.
-- KEYS[1]; ARGV: microseconds a token, tokens of a full bucket. Gives {1 if one was there, us until full, us until one}.
local interval, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local full = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), now)
local after = full + interval
if after - now > interval * burst then
  return {0, math.floor(full - now), math.ceil(after - now - interval * burst)}
end
redis.call('SET', KEYS[1], string.format('%.0f', after), 'PX', math.ceil((after - now) / 1000) + 1)
return {1, math.floor(after - now), 0}
