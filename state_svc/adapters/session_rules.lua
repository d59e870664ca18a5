-- Shared by sessions.lua and runs.lua, which put it before themselves: sessions of one tenant. The same
-- rules, in Python and with their reasons, are state_svc/domain/session_book.py.
-- KEYS[1] has the tenant's hash tag; every other key is made from its prefix, "sluice:{<tenant>}:".
-- ARGV: op, clock (ms; 0: the server's), latest time at which this may still be done (ms; 0: any), then the op's.
--
-- Keys, all owned here. session:<id> hash, session:<id>:messages list: they run out when idle, not
-- while a turn is open. sessions (ids by number), sessions:expiry (ids by their end, open turns at
-- infinity), sessions:size (bytes by id), sessions:meta (n, bytes): run out an hour after the last session.
-- session:<id>:request:<request>, sessions:request:<request>: a day.
local call, floor = redis.call, math.floor
local P = string.match(KEYS[1], '^(sluice:{[^}]+}:)')
local TENANT = string.match(P, '{(.+)}')
local DEDUP_MS, KEY_SLACK_MS, PAGE_BYTES = 86400000, 3600000, 3145728
local MESSAGE_OVERHEAD, SESSION_OVERHEAD, DROP_MAX = 16, 512, 64

local op, now, latest = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end
if latest > 0 and now > latest then return {'LATE'} end

-- Whether an id stands for something else than what is asked for now. A mark of an earlier release does not say.
local function reused(earlier, asked) return earlier and earlier ~= '' and earlier ~= asked end

local at = 3
local function take() at = at + 1; return ARGV[at] end
local function int() return tonumber(take()) end
-- The arguments from here to the end, and their size.
local function rest()
  local found, size = {}, 0
  for i = at + 1, #ARGV do
    found[#found + 1] = ARGV[i]
    size = size + #ARGV[i] + MESSAGE_OVERHEAD
  end
  return found, size
end
local function push(key, values)
  for i = 1, #values, 1000 do call('RPUSH', key, unpack(values, i, math.min(i + 999, #values))) end
end
-- Elements of a list from an index on: at most `most`, at most `bytes` (else a page), one if there is one. They are read
-- few at a time to begin with: what does not fit was read in vain.
local function page(key, first, most, bytes)
  local found, size, i, step = {}, 0, first, 4
  bytes = bytes or PAGE_BYTES
  while #found < most do
    local some = call('LRANGE', key, i, math.min(i + step, first + most) - 1)
    step = math.min(2 * step, 64)
    if #some == 0 then return found end
    for _, one in ipairs(some) do
      size = size + #one
      if #found > 0 and size > bytes then return found end
      found[#found + 1] = one
    end
    i = i + #some
  end
  return found
end

local S, S_EXPIRY, S_SIZE, S_META = P .. 'sessions', P .. 'sessions:expiry', P .. 'sessions:size', P .. 'sessions:meta'
local S_INDEX = {S, S_EXPIRY, S_SIZE, S_META}
local S_ROW = {'version', 'count', 'bytes', 'create', 'update', 'expire', 'open'}
local function session_key(id) return P .. 'session:' .. id end

-- The session's fields, or nil: unknown, or run out by the clock that counts.
local function session_row(id)
  local row = call('HMGET', session_key(id), unpack(S_ROW))
  if not row[1] then return nil end
  if row[7] == '' and now >= tonumber(row[6]) then return nil end
  return row
end
local function session_drop(id)
  local size = call('HGET', S_SIZE, id)
  if size then call('HINCRBY', S_META, 'bytes', -size) end
  call('HDEL', S_SIZE, id)
  call('ZREM', S, id)
  call('ZREM', S_EXPIRY, id)
  call('UNLINK', session_key(id), session_key(id) .. ':messages')
end
local function sessions_drop_expired()
  for _, id in ipairs(call('ZRANGEBYSCORE', S_EXPIRY, '-inf', now, 'LIMIT', 0, DROP_MAX)) do session_drop(id) end
end
-- The indexes run out after the last session: as late as the latest of them.
local function sessions_keep()
  local last = call('ZRANGE', S_EXPIRY, -1, -1, 'WITHSCORES')[2]
  for _, key in ipairs(S_INDEX) do
    if last == 'inf' then call('PERSIST', key)
    else call('PEXPIRE', key, math.max(tonumber(last or now) - now, 0) + KEY_SLACK_MS) end
  end
end
-- Idle from now on, or open.
local function session_touch(id, open)
  local key = session_key(id)
  local ttl = tonumber(call('HGET', key, 'ttl'))
  call('HSET', key, 'open', open, 'expire', now + ttl)
  call('ZADD', S_EXPIRY, open == '' and now + ttl or '+inf', id)
  for _, one in ipairs({key, key .. ':messages'}) do
    if open == '' then call('PEXPIRE', one, ttl) else call('PERSIST', one) end
  end
  sessions_keep()
end
-- Adds messages, or says why not; then nothing was done. limits: messages, bytes, bytes of the tenant.
local function session_add(id, messages, size, limits, overhead)
  local key = session_key(id)
  local known = call('HMGET', key, 'count', 'bytes')
  local count, bytes = tonumber(known[1] or 0), tonumber(known[2] or 0)
  if count + #messages > limits[1] then return {'SESSION_FULL', 'session_messages_max'} end
  if bytes + size > limits[2] then return {'SESSION_FULL', 'session_bytes_max'} end
  local held = tonumber(call('HGET', S_META, 'bytes') or 0)
  if held + size + overhead > limits[3] then return {'SESSIONS_FULL', 'sessions_bytes_max'} end
  push(key .. ':messages', messages)
  call('HSET', key, 'count', count + #messages, 'bytes', bytes + size, 'update', now)
  call('HINCRBY', key, 'version', 1)
  call('HINCRBY', S_META, 'bytes', size + overhead)
  call('HINCRBY', S_SIZE, id, size + overhead)
  return nil
end
