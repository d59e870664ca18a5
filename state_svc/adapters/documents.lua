-- Changes the documents of one collection of a tenant. All keys have the tenant's hash tag.
-- KEYS: 1 library (hash: counter, bytes), 2 names of collections (set), 3 the collection (hash:
-- version, floor, dims, stored, size), 4 its documents (sorted set, by name), 5 what is live (hash:
-- generation -> "<chunks> <bytes of labels> <labels><document>"), 6 what changed (sorted set:
-- generation by version), 7 the document (hash), 8 its newest content, 9 the request (put only).
-- Chunks of a generation: ARGV[2] .. generation, a hash: t<number>, i<number>, count, size.
-- Each call is whole or not at all; a generation goes live in the same script in which its
-- predecessor goes away, so that no search sees both or neither.
local op, chunks_prefix = ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function number(key, field) return tonumber(redis.call('HGET', key, field) or '0') end
local function add(key, field, by)
  if by ~= 0 then redis.call('HINCRBY', key, field, by) end
end

-- Grows also over the loss of the store, so that no cache takes new things for old ones.
local function next_version()
  local version = math.max(number(KEYS[1], 'counter') + 1, now)
  redis.call('HSET', KEYS[1], 'counter', string.format('%.0f', version))
  return string.format('%.0f', version)
end

-- What a document counts for beside its chunks. One that an earlier release put: its content alone.
local function weight()
  local weight, size = unpack(redis.call('HMGET', KEYS[7], 'weight', 'size'))
  return tonumber(weight or size or '0')
end

local function drop_chunks(generation)
  local key = chunks_prefix .. generation
  add(KEYS[3], 'stored', -number(key, 'count'))
  add(KEYS[3], 'size', -number(key, 'size'))
  add(KEYS[1], 'bytes', -number(key, 'size'))
  redis.call('UNLINK', key)
end

-- What went live or away with a version; the oldest entries go, and searchers that far behind read
-- everything.
local function note(version, generations)
  redis.call('HSET', KEYS[3], 'version', version)
  for _, generation in ipairs(generations) do redis.call('ZADD', KEYS[6], version, generation) end
  local over = redis.call('ZCARD', KEYS[6]) - 1000
  if over > 0 then
    local last = redis.call('ZRANGE', KEYS[6], over - 1, over - 1, 'WITHSCORES')
    redis.call('HSET', KEYS[3], 'floor', string.format('%.0f', tonumber(last[2])))
    redis.call('ZREMRANGEBYRANK', KEYS[6], 0, over - 1)
  end
end

local function state() return {'OK', redis.call('HGETALL', KEYS[7])} end

if op == 'put' then
  -- 3 content, 4 media type, 5 labels, 6 digest, 7 document, 8 collection, 9.. limits: collections,
  -- bytes, documents; 12 seconds for which the request is known, 13 what the document counts for
  -- beside content and chunks
  local known = redis.call('GET', KEYS[9])
  if known then
    local generation, made, digest = string.match(known, '^(%d+) (%d+) (.*)$')
    if digest ~= ARGV[6] then return {'REUSED'} end
    if redis.call('EXISTS', KEYS[7]) == 0 then return {'DELETED'} end
    return {'KNOWN', generation, made, redis.call('HMGET', KEYS[7], 'live', 'chunks')}
  end
  local size = #ARGV[3]
  local old, new = weight(), size + tonumber(ARGV[13])
  if number(KEYS[1], 'bytes') + new - old > tonumber(ARGV[10]) then
    return {'FULL', 'documents_bytes_max'}
  end
  local fresh = redis.call('SISMEMBER', KEYS[2], ARGV[8]) == 0
  if fresh and redis.call('SCARD', KEYS[2]) >= tonumber(ARGV[9]) then
    return {'FULL', 'collections_max'}
  end
  local newest, live = unpack(redis.call('HMGET', KEYS[7], 'generation', 'live'))
  if not newest and redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[11]) then
    return {'FULL', 'documents_max'}
  end
  local generation = next_version()
  if fresh then
    -- An earlier collection of this name may still be remembered: it is behind the floor.
    redis.call('SADD', KEYS[2], ARGV[8])
    redis.call('HSET', KEYS[3], 'version', generation, 'floor', generation)
  end
  if newest and newest ~= live then drop_chunks(newest) end
  redis.call('SET', KEYS[8], ARGV[3])
  add(KEYS[1], 'bytes', new - old)
  redis.call('ZADD', KEYS[4], 0, ARGV[7])
  redis.call('HSET', KEYS[7], 'generation', generation, 'size', size, 'weight', new,
    'media_type', ARGV[4], 'labels', ARGV[5], 'made', string.format('%.0f', now))
  redis.call('SET', KEYS[9], string.format('%s %.0f %s', generation, now, ARGV[6]), 'EX', ARGV[12])
  return state()
end

if op == 'delete' then
  -- 3 document, 4 collection, 5 the last generation that may be the newest one; empty: any
  local newest, live = unpack(redis.call('HMGET', KEYS[7], 'generation', 'live'))
  if not newest then return {'ABSENT'} end
  if ARGV[5] ~= '' and tonumber(newest) > tonumber(ARGV[5]) then return {'ABSENT'} end
  drop_chunks(newest)
  if live then
    if live ~= newest then drop_chunks(live) end
    redis.call('HDEL', KEYS[5], live)
  end
  add(KEYS[1], 'bytes', -weight())
  redis.call('UNLINK', KEYS[7], KEYS[8])
  redis.call('ZREM', KEYS[4], ARGV[3])
  if redis.call('ZCARD', KEYS[4]) == 0 then
    redis.call('UNLINK', KEYS[3], KEYS[4], KEYS[5], KEYS[6])
    redis.call('SREM', KEYS[2], ARGV[4])
  elseif live then
    note(next_version(), {live})
  end
  return {'OK'}
end

if op == 'abandon' then
  -- 3 generation
  local newest, live = unpack(redis.call('HMGET', KEYS[7], 'generation', 'live'))
  if newest == ARGV[3] and live ~= newest then drop_chunks(newest) end
  return {'OK'}
end

-- store: 3 generation, 4 dims, 5 number of chunks in all or -1, 6 limit of chunks, 7 limit of bytes,
-- 8 document, then per chunk: number, what it shows, its record
local generation, dims, total = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local newest, live = unpack(redis.call('HMGET', KEYS[7], 'generation', 'live'))
if newest ~= generation then return {'REPLACED'} end
if live == generation then return state() end
local known_dims = number(KEYS[3], 'dims')
if #ARGV > 8 and known_dims ~= dims and number(KEYS[3], 'stored') > 0 then return {'DIMS', known_dims} end
local key = chunks_prefix .. generation
local new, grown = 0, 0
for i = 9, #ARGV, 3 do
  local before = redis.call('HSTRLEN', key, 't' .. ARGV[i])
  if before == 0 then new = new + 1 end
  grown = grown + #ARGV[i + 1] + #ARGV[i + 2] - before - redis.call('HSTRLEN', key, 'i' .. ARGV[i])
end
if number(KEYS[3], 'stored') + new > tonumber(ARGV[6]) then return {'FULL', 'chunks_max'} end
if number(KEYS[1], 'bytes') + grown > tonumber(ARGV[7]) then return {'FULL', 'documents_bytes_max'} end
if #ARGV > 8 then redis.call('HSET', KEYS[3], 'dims', dims) end
for i = 9, #ARGV, 3 do
  redis.call('HSET', key, 't' .. ARGV[i], ARGV[i + 1], 'i' .. ARGV[i], ARGV[i + 2])
end
add(key, 'count', new)
add(key, 'size', grown)
add(KEYS[3], 'stored', new)
add(KEYS[3], 'size', grown)
add(KEYS[1], 'bytes', grown)
if total < 0 then return state() end
if number(key, 'count') ~= total then return {'MISSING'} end
for n = 0, total - 1 do
  if redis.call('HEXISTS', key, 't' .. n) == 0 then return {'MISSING'} end
end
local labels = redis.call('HGET', KEYS[7], 'labels')
redis.call('HSET', KEYS[5], generation, string.format('%d %d ', total, #labels) .. labels .. ARGV[8])
redis.call('HSET', KEYS[7], 'live', generation, 'chunks', total)
if live then
  drop_chunks(live)
  redis.call('HDEL', KEYS[5], live)
  note(next_version(), {live, generation})
else
  note(next_version(), {generation})
end
return state()
