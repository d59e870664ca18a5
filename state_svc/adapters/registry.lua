-- Writes or deletes one record of the registry, or reads those of one tenant. All keys have the hash
-- tag {registry}. KEYS: records, unique values, revision; then the same three of the tenants (to write
-- a key or tool), or of keys and of tools (to delete a tenant). A record is "<version> <value>".
-- Beside the tenants: <tenants>:deletions, a hash of "<number> <state>" by the names of deleted tenants, and
-- <tenants>:deletions:last, the largest number. A deletion and its mark are one: see state_svc/deletion_ports.py.
local op, name, expected = ARGV[1], ARGV[2], tonumber(ARGV[3])
local marks = KEYS[1] == 'sluice:{registry}:tenants' and KEYS[1] .. ':deletions'

-- The records whose names begin with a tenant's; one pass over the names.
local function children(records, parent)
  local prefix, found = parent .. '/', {}
  for _, child in ipairs(redis.call('HKEYS', records)) do
    if string.sub(child, 1, #prefix) == prefix then found[#found + 1] = child end
  end
  return found
end

if op == 'children' then
  local found = {}
  for _, child in ipairs(children(KEYS[1], name)) do
    found[#found + 1] = child
    found[#found + 1] = redis.call('HGET', KEYS[1], child)
  end
  return found
end

-- Moves a mark on, or takes it away: 3 what it is, 4 what it becomes or nothing.
if op == 'mark' then
  if redis.call('HGET', marks, name) ~= ARGV[3] then return {'VERSION'} end
  if ARGV[4] == '' then redis.call('HDEL', marks, name) else redis.call('HSET', marks, name, ARGV[4]) end
  return {'OK', 0}
end

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
  for i = 4, #KEYS, 3 do
    local gone = {}
    for _, child in ipairs(children(KEYS[i], name)) do gone[child] = true end
    if next(gone) then
      forget(KEYS[i], KEYS[i + 1], gone)
      redis.call('INCR', KEYS[i + 2])
    end
  end
  if marks then
    local time, last = redis.call('TIME'), marks .. ':last'
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    local number = string.format('%.0f', math.max(tonumber(redis.call('GET', last) or '0') + 1, now))
    redis.call('SET', last, number)
    redis.call('HSET', marks, name, number .. ' purging')
  end
  redis.call('INCR', KEYS[3])
  return {'OK', 0}
end

-- put: 4 most records, 5 most of one tenant or 0, 6 their bytes, 7 value, then unique values
local parent = string.match(name, '^[^/]+')
if KEYS[4] and redis.call('HEXISTS', KEYS[4], parent) == 0 then return {'PARENT'} end
local mark = not known and marks and redis.call('HGET', marks, name)
local number, state = string.match(mark or '', '^(%d+) (%a+)$')
if state == 'purging' then return {'PURGING'} end
local held = redis.call('HLEN', KEYS[1]) + (marks and redis.call('HLEN', marks) or 0) - (mark and 1 or 0)
if not known and held >= tonumber(ARGV[4]) then return {'FULL'} end
if tonumber(ARGV[5]) > 0 then
  local others, bytes = 0, #ARGV[7]
  for _, child in ipairs(children(KEYS[1], parent)) do
    if child ~= name then
      others = others + 1
      bytes = bytes + redis.call('HSTRLEN', KEYS[1], child)
    end
  end
  if others >= tonumber(ARGV[5]) or bytes > tonumber(ARGV[6]) then return {'FULL'} end
end
for i = 8, #ARGV do
  local owner = redis.call('HGET', KEYS[2], ARGV[i])
  if owner and owner ~= name then return {'TAKEN'} end
end
for i = 8, #ARGV do redis.call('HSET', KEYS[2], ARGV[i], name) end
if mark then redis.call('HSET', marks, name, number .. ' returning') end
local revision = redis.call('INCR', KEYS[3])
redis.call('HSET', KEYS[1], name, revision .. ' ' .. ARGV[7])
return {'OK', revision}
