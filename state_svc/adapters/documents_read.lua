-- What changed in a collection since a version, whole and of one moment, if it is little.
-- KEYS: 1 the collection, 2 what is live, 3 what changed (see documents.lua). ARGV: version, prefix of
-- chunks' keys, most generations, most chunks. Answers {version, dims, {generation, entry, {record...}}...}
-- with false for the entry of one that is gone; {0, 0}: no collection; {}: it is more than that.
local version, dims, floor = unpack(redis.call('HMGET', KEYS[1], 'version', 'dims', 'floor'))
if not version then return {0, 0} end
local since, most = tonumber(ARGV[1]), tonumber(ARGV[3])
if since == 0 or since < tonumber(floor) then return {} end
local generations = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[1], '+inf', 'LIMIT', 0, most + 1)
if #generations > most then return {} end
local answer, chunks = {version, dims or '0'}, 0
for _, generation in ipairs(generations) do
  local entry = redis.call('HGET', KEYS[2], generation)
  local records = {}
  if entry then
    local count = tonumber(string.match(entry, '^(%d+) '))
    chunks = chunks + count
    if chunks > tonumber(ARGV[4]) then return {} end
    for n = 0, count - 1 do
      records[n + 1] = redis.call('HGET', ARGV[2] .. generation, 'i' .. n)
    end
  end
  answer[#answer + 1] = {generation, entry, records}
end
return answer
