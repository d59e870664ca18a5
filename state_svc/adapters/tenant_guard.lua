-- Put before every script that writes what belongs to a tenant: refuses it while the tenant is deleted. The
-- fence is written by tenant_fence.lua, on the same hash tag, so no write comes between the check and the act.
do
  local fence = redis.call('GET', string.match(KEYS[1], '^sluice:{[^}]+}:') .. 'deletion')
  if fence and string.sub(fence, 1, 1) == 'c' then return redis.error_reply('TENANT_DELETED no such tenant') end
end
