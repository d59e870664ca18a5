-- The fence of a deleted tenant. KEYS[1]: sluice:{<tenant>}:deletion, "c<number>" closed or "o<number>" opened
-- again, owned here, 100 days; for open KEYS[2], the first hour of usage that the tenant of today may see, as long,
-- and KEYS[3], the quota, which no fence keeps from being settled: a new tenant begins without.
-- Numbers grow: a process that stood still since an earlier deletion closes, deletes and opens nothing.
-- ARGV: op, number, seconds to keep; then for open whether the ledger of usage is here. purge: KEYS[2..] are
-- keys to delete; they go only while the fence of this very deletion is closed.
local call, op, number = redis.call, ARGV[1], ARGV[2]
local fence = call('GET', KEYS[1]) or ''
local known = tonumber(string.sub(fence, 2)) or 0

if op == 'close' then
  if known > tonumber(number) or fence == 'o' .. number then return 0 end
  call('SET', KEYS[1], 'c' .. number, 'EX', ARGV[3])
  return 1
end

if op == 'purge' then
  if fence ~= 'c' .. number then return 0 end
  for i = 2, #KEYS do call('UNLINK', KEYS[i]) end
  return 1
end

-- open
if known > tonumber(number) or fence == 'o' .. number then return 0 end
call('SET', KEYS[1], 'o' .. number, 'EX', ARGV[3])
call('UNLINK', KEYS[3])
if ARGV[4] == '1' then
  call('SET', KEYS[2], string.format('%.0f', math.floor(call('TIME')[1] / 3600) + 1), 'EX', ARGV[3])
end
return 1
