-- Writes or deletes one record of the registry. All keys have the hash tag {registry}.
-- KEYS: records, unique values, revision; then the same three of the tenants (to write a key) or of
-- the keys (to delete a tenant). A record is "<version> <value>".
local op, name, expected = ARGV[1], ARGV[2], tonumber(ARGV[3])
local known = redis.call('HGET', KEYS[1], name)
local version = known and tonumber(string.match(known, '^(%d+) ')) or 0
if expected >= 0 and version ~= expected then return {'VERSION'} end

-- In one pass over the unique values, however many records go: the store answers nobody meanwhile.
local function forget(records, unique, gone)
  for which in pairs(gone) do redis.call('HDEL', records, which) end
  local all = redis.call('HGETALL', unique)
  for i = 1, #all, 2 do
    if gone[all[i + 1]] then redis.call('HDEL', unique, all[i]) end
  end
end

if op == 'delete' then
  if not known then return {'ABSENT'} end
  forget(KEYS[1], KEYS[2], {[name] = true})
  if KEYS[4] then
    local prefix, children = name .. '/', {}
    for _, child in ipairs(redis.call('HKEYS', KEYS[4])) do
      if string.sub(child, 1, #prefix) == prefix then children[child] = true end
    end
    if next(children) then
      forget(KEYS[4], KEYS[5], children)
      redis.call('INCR', KEYS[6])
    end
  end
  redis.call('INCR', KEYS[3])
  return {'OK', 0}
end

if KEYS[4] and redis.call('HEXISTS', KEYS[4], string.match(name, '^[^/]+')) == 0 then return {'PARENT'} end
if not known and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then return {'FULL'} end
for i = 6, #ARGV do
  local owner = redis.call('HGET', KEYS[2], ARGV[i])
  if owner and owner ~= name then return {'TAKEN'} end
end
for i = 6, #ARGV do redis.call('HSET', KEYS[2], ARGV[i], name) end
local revision = redis.call('INCR', KEYS[3])
redis.call('HSET', KEYS[1], name, revision .. ' ' .. ARGV[5])
return {'OK', revision}
