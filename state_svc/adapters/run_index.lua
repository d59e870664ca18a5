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

-- Where to look now, at most ARGV[3], and when the next after them is due; nobody else looks there before ARGV[4] ms have
-- passed (0: nothing changes). Classes after ARGV[5], the tenants from ARGV[7] on and the first ARGV[6] places are passed over,
-- however many they are: what there is no room for must not hide the others. Walks from the earliest on.
if op == 'look' then
  local most, last, without, limited = tonumber(ARGV[3]), tonumber(ARGV[5]), {}, #ARGV > 6
  for i = 7, #ARGV do without[ARGV[i]] = true end
  local names, at, first, step, rows = {}, tonumber(ARGV[6]), nil, 8, nil -- few at a time to begin with: most often none is due
  repeat
    rows = call('ZRANGE', KEYS[1], at, at + step - 1, 'WITHSCORES')
    at, step = at + step, math.min(2 * step, 1024)
    for i = 1, #rows, 2 do
      local name = rows[i]
      if string.byte(name) - 48 <= last and not (limited and without[string.sub(name, 3)]) then
        if #names < most and tonumber(rows[i + 1]) <= now then
          names[#names + 1] = name
        else
          first = tonumber(rows[i + 1])
          break
        end
      end
    end
  until first or #rows == 0
  if ARGV[4] ~= '0' then
    for _, name in ipairs(names) do call('ZADD', KEYS[1], 'XX', now + ARGV[4], name) end
  end
  return {now, first or -1, names}
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
