-- Where runs may be ready: a hint for those that claim. All keys have the hash tag {runs}.
-- KEYS[1]: "<priority>:<tenant>" by the time (ms) at which to look there; KEYS[2]: when each was last written
-- by somebody who made a run ready. No time to live: what nobody needs any more is removed below.
-- ARGV: op, clock (ms; 0: the server's), then the op's. Why no run is ever lost by this: valkey_run_index.py.
local call = redis.call
local op, now = ARGV[1], tonumber(ARGV[2])
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Something is ready there now.
if op == 'ready' then
  call('ZADD', KEYS[1], 'LT', now, ARGV[3])
  call('HSET', KEYS[2], ARGV[3], now)
  if ARGV[4] ~= '' then call('PUBLISH', ARGV[4], ARGV[5]) end
  return now
end

-- Where to look now, at most ARGV[3]; nobody else looks there before ARGV[4] ms have passed (0: nothing changes). Classes
-- after ARGV[5] and the tenants from ARGV[6] on are passed over.
if op == 'look' then
  local without = {}
  for i = 6, #ARGV do without[ARGV[i]] = true end
  local function passed(name)
    local priority, tenant = string.match(name, '^(%d+):(.+)$')
    return tonumber(priority) > tonumber(ARGV[5]) or without[tenant]
  end
  local names, left = {}, 0
  for _, name in ipairs(call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[3])) do
    if passed(name) then left = left + 1 else names[#names + 1] = name end
  end
  if ARGV[4] ~= '0' then
    for _, name in ipairs(names) do call('ZADD', KEYS[1], 'XX', now + ARGV[4], name) end
  end
  local first
  local rows = call('ZRANGE', KEYS[1], 0, left, 'WITHSCORES')
  for i = 1, #rows, 2 do
    if not first and not passed(rows[i]) then first = rows[i + 1] end
  end
  return {now, tonumber(first or -1), names}
end

-- What was found there: per place its name and when to look next (-1: nothing waits there).
-- ARGV[3]: when those who looked had postponed them to; ARGV[4]: how long (ms) an unused place is kept; ARGV[5]: channel;
-- ARGV[6]: what to tell there, if anything.
if op == 'found' then
  for i = 7, #ARGV, 2 do
    local name, due = ARGV[i], tonumber(ARGV[i + 1])
    if due >= 0 then
      call('ZADD', KEYS[1], 'LT', due, name)
    elseif call('ZSCORE', KEYS[1], name) == ARGV[3] and now - (call('HGET', KEYS[2], name) or 0) >= tonumber(ARGV[4]) then
      call('ZREM', KEYS[1], name)
      call('HDEL', KEYS[2], name)
    end
  end
  if ARGV[6] ~= '' then call('PUBLISH', ARGV[5], ARGV[6]) end
  return now
end
