-- Writes or deletes values and blobs of one tenant. All keys have the tenant's hash tag.
-- KEYS: 1 names by when they end (sorted set, ms), 2 their sizes, and under '' the sum (hash), 3 the
-- item (a value: hash v, d; a blob: string), 4 of values the counter of versions, of blobs the names of
-- the owner (set). An item ends by itself; what is counted of it goes with the next write,
-- or an hour after the last one has ended.
local op, prefix = ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function forget(name)
  local size = redis.call('HGET', KEYS[2], name)
  if size then redis.call('HINCRBY', KEYS[2], '', -size) end
  redis.call('HDEL', KEYS[2], name)
  redis.call('ZREM', KEYS[1], name)
  local owner, own = string.match(name, '^([^/]*)/(.*)$')
  if op == 'blob' and owner then redis.call('SREM', ARGV[3] .. owner, own) end
end

-- value: 3 -, 4 name, 5 content, 6 time to live (ms), 7 most items, 8 most bytes, 9 expected version
-- blob: 3 prefix of owners' sets, 4 name, 5 content, 6 to 8 alike, 9 own name
local function keep()
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)) do forget(name) end
  local name, ttl = ARGV[4], tonumber(ARGV[6])
  local old = redis.call('HGET', KEYS[2], name)
  local size = #name + #ARGV[5]
  local sum = tonumber(redis.call('HGET', KEYS[2], '') or '0') - (old or 0)
  if not old and redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[7]) then return {'FULL', op .. 's_max'} end
  if sum + size > tonumber(ARGV[8]) then return {'FULL', op .. 's_bytes_max'} end
  redis.call('HSET', KEYS[2], name, size, '', sum + size)
  redis.call('ZADD', KEYS[1], now + ttl, name)
  local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
  for i = 1, 2 do redis.call('PEXPIREAT', KEYS[i], last + 3600000) end
  return nil
end

if op == 'value' or op == 'unset' then
  local version = tonumber(redis.call('HGET', KEYS[3], 'v') or '0')
  local expected = tonumber(op == 'value' and ARGV[9] or ARGV[5])
  if op == 'unset' then
    if version == 0 then return {'ABSENT'} end
    if expected >= 0 and version ~= expected then return {'VERSION'} end
    redis.call('DEL', KEYS[3])
    forget(ARGV[4])
    return {'OK'}
  end
  if expected >= 0 and version ~= expected then return {'VERSION'} end
  local full = keep()
  if full then return full end
  -- Never given again: one that was deleted and made anew is not taken for what it was.
  version = math.max(tonumber(redis.call('GET', KEYS[4]) or '0') + 1, now)
  redis.call('SET', KEYS[4], string.format('%.0f', version), 'PX', 100 * 86400000)
  redis.call('HSET', KEYS[3], 'v', string.format('%.0f', version), 'd', ARGV[5])
  redis.call('PEXPIREAT', KEYS[3], now + ARGV[6])
  return {'OK', version}
end

if op == 'blob' then
  local full = keep()
  if full then return full end
  redis.call('SET', KEYS[3], ARGV[5], 'PXAT', now + ARGV[6])
  redis.call('SADD', KEYS[4], ARGV[9])
  if redis.call('PTTL', KEYS[4]) < tonumber(ARGV[6]) then
    redis.call('PEXPIREAT', KEYS[4], now + ARGV[6])
  end
  return {'OK'}
end

-- drop: 3 owner: all its blobs
local deleted = 0
for _, own in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  deleted = deleted + redis.call('DEL', prefix .. ARGV[3] .. '/' .. own)
  forget(ARGV[3] .. '/' .. own)
end
redis.call('DEL', KEYS[4])
return {'OK', deleted}
