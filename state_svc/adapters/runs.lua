-- One operation on runs of one tenant; after session_rules.lua, because a run may have a session's turn.
-- The same rules, in Python and with their reasons, are state_svc/domain/run_book.py; a test holds both to
-- equal answers. Answers {status, ...}.
--
-- Keys, all owned here. run:<id> hash, run:<id>:events list: without end while the run has none, then as
-- long as ended runs are kept. run:<id>:resume:<request>, runs:request:<request>: a day. runs (ids by number), runs:meta (n,
-- bytes, ended: bytes of ended ones, open, active_max), runs:ended ("<bytes>:<id>" by end), runs:whole (ids of ended ones that
-- have all their events, by end), runs:active (ids by lease end, counted ones), runs:counted (ids that count against open_max),
-- runs:wall (ids of queued and paused ones by the end of their wall time), runs:line:<priority>:<0 uncounted, 1 counted,
-- 2 only to be ended> (ids by due time): while a run is open, then as long as the last is kept.
local QUEUED, RUNNING, PAUSED, WAITING = 1, 2, 3, 4
local RUN_OVERHEAD, SCAN_MAX, TRIM_MAX = 1024, 1000, 1000
local TO_END = 2
local LOSS_WAIT_MS, LOSS_WAIT_MAX_MS = 2000, 120000
local ALL, META, ENDED, ACTIVE, COUNTED = P .. 'runs', P .. 'runs:meta', P .. 'runs:ended', P .. 'runs:active', P .. 'runs:counted'
local WHOLE_RUNS, WALL = P .. 'runs:whole', P .. 'runs:wall'
local BRIEF = {'phase', 'summary', 'seq', 'create', 'end', 'cancelled', 'dstep', 'session', 'priority'}
local WHOLE = {'phase', 'summary', 'seq', 'create', 'end', 'cancelled', 'dstep', 'session', 'priority', 'decision', 'spec',
  'asked'}

local function run_key(id) return P .. 'run:' .. id end
local function exists(id) return call('EXISTS', run_key(id)) == 1 end
local function row(id, fields) return call('HMGET', run_key(id), unpack(fields)) end
local function read(id, ...)
  local found = call('HMGET', run_key(id), ...)
  for i = 1, #found do found[i] = tonumber(found[i]) or found[i] end
  return unpack(found)
end
local function line(priority, counted) return P .. 'runs:line:' .. priority .. ':' .. counted end
local function meta(name) return tonumber(call('HGET', META, name) or 0) end
local function room() return meta('active_max') - call('ZCOUNT', ACTIVE, '(' .. string.format('%.0f', now), '+inf') end

local function run_drop(member)
  local bytes, id = string.match(member, '^(%d+):(.+)$')
  call('UNLINK', run_key(id), run_key(id) .. ':events')
  call('ZREM', ALL, id)
  call('ZREM', ENDED, member)
  call('ZREM', WHOLE_RUNS, id)
  call('HINCRBY', META, 'bytes', -bytes)
  call('HINCRBY', META, 'ended', -bytes)
end
-- Leaves of an ended run what a repeated request and GetRun are answered with, and its last event.
local function run_trim(id)
  local key = run_key(id)
  local size, seq, at = read(id, 'bytes', 'seq', 'end')
  call('ZREM', WHOLE_RUNS, id)
  if not seq then return end
  local last = call('LINDEX', key .. ':events', -1) or ''
  local left = RUN_OVERHEAD + call('HSTRLEN', key, 'summary') + #last + MESSAGE_OVERHEAD
  if left >= size then return end
  call('LTRIM', key .. ':events', -1, -1)
  call('HSET', key, 'spec', '', 'decision', '', 'bytes', left, 'gone', seq - 1)
  call('ZREM', ENDED, size .. ':' .. id)
  call('ZADD', ENDED, at, left .. ':' .. id)
  call('HINCRBY', META, 'bytes', left - size)
  call('HINCRBY', META, 'ended', left - size)
end
local function drop_old(kept)
  for _, member in ipairs(call('ZRANGEBYSCORE', ENDED, '-inf', now - kept, 'LIMIT', 0, DROP_MAX)) do run_drop(member) end
end
-- Whether so many more bytes fit, if need be without ended runs that no repeated request can ask for, then without the events
-- of ended ones, oldest first. What is left of ended ones does not hold up the growth of one under way.
local function make_room(growth, most, kept, grows)
  drop_old(kept)
  local function missing() return meta('bytes') + growth > most end
  if not missing() then return true end
  for _, member in ipairs(call('ZRANGEBYSCORE', ENDED, '-inf', now - DEDUP_MS, 'LIMIT', 0, TRIM_MAX)) do
    run_drop(member)
    if not missing() then return true end
  end
  for _, id in ipairs(call('ZRANGE', WHOLE_RUNS, 0, TRIM_MAX - 1)) do
    run_trim(id)
    if not missing() then return true end
  end
  return grows and meta('bytes') - meta('ended') + growth <= most
end
-- Milliseconds until an ended run goes by itself, where that makes room; 0: room comes when a run ends. 1: now, because one
-- script gives up TRIM_MAX of them, and there are more.
local function room_in(growth, most)
  local oldest = call('ZRANGE', ENDED, 0, 0, 'WITHSCORES')[2]
  if not oldest or meta('bytes') - meta('ended') + growth > most then return 0 end
  if call('EXISTS', WHOLE_RUNS) == 1 then return 1 end
  return math.max(oldest + DEDUP_MS - now, 1)
end
local function grow(id, growth)
  if growth == 0 then return end
  call('HINCRBY', run_key(id), 'bytes', growth)
  call('HINCRBY', META, 'bytes', growth)
end
-- Notes when the time of a run that nobody holds is over.
local function note_wall(id, counted)
  local wall = tonumber(call('HGET', run_key(id), 'wall') or 0)
  if wall > 0 and counted ~= TO_END then call('ZADD', WALL, wall, id) end
end
-- From now on the run has only to be ended: uncounted, and for who has no room for more than that.
local function to_end(id, priority, counted)
  call('ZREM', line(priority, counted), id)
  call('ZREM', WALL, id)
  call('HSET', run_key(id), 'counted', TO_END)
  call('ZADD', line(priority, TO_END), now, id)
end
local function overdue_to_end()
  for _, id in ipairs(call('ZRANGEBYSCORE', WALL, '-inf', now, 'LIMIT', 0, DROP_MAX)) do
    local priority, counted = read(id, 'priority', 'counted')
    if counted then to_end(id, priority, counted) else call('ZREM', WALL, id) end
  end
end
-- Nobody holds the run: ready now.
local function queue(id, priority, counted, cancelled)
  call('ZREM', ACTIVE, id)
  call('HSET', run_key(id), 'phase', QUEUED)
  if cancelled == 1 then
    to_end(id, priority, counted)
  else
    call('ZADD', line(priority, counted), now, id)
    note_wall(id, counted)
  end
  if tonumber(call('HGET', run_key(id), 'counts_open')) == 1 then call('SADD', COUNTED, id) end
end
-- How many holders a ready run has lost in a row, and how long it waits for that: loss_wait_ms in run_book.py says why.
-- Writes nothing: who leaves the run for another reason has not counted its loss.
local function losses_of(id, counted)
  local phase, losses = read(id, 'phase', 'losses')
  losses = losses or 0
  if counted == TO_END or phase ~= RUNNING then return losses, 0 end
  losses = losses + 1
  return losses, losses > 1 and math.min(LOSS_WAIT_MS * 4 ^ (losses - 2), LOSS_WAIT_MAX_MS) or 0
end
local function hold_back(id, priority, counted, losses, wait)
  call('HSET', run_key(id), 'phase', PAUSED, 'losses', losses)
  call('ZADD', line(priority, counted), now + wait, id)
  note_wall(id, counted)
end
-- When a run of the class may be ready next, or nil. What no room is left for: when a lease ends.
local function due_of(priority)
  local first
  for _, kind in ipairs({TO_END, 0}) do
    local one = tonumber(call('ZRANGE', line(priority, kind), 0, 0, 'WITHSCORES')[2])
    if one and (not first or one < first) then first = one end
  end
  local due = tonumber(call('ZRANGE', line(priority, 1), 0, 0, 'WITHSCORES')[2])
  if due and due <= now and room() <= 0 then
    due = tonumber(call('ZRANGEBYSCORE', ACTIVE, '(' .. string.format('%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
  end
  if first and due then return math.min(first, due) end
  return first or due
end
-- When each class may be ready next, and whether one is now.
local function dues()
  local found, ready = {}, 0
  for priority = 1, 4 do
    local due = due_of(priority)
    if due then found[#found + 1] = {priority, due} end
    if due and due <= now then ready = 1 end
  end
  return found, ready
end

if op == 'create' then
  local request, id, priority, active_max, open_max, session, wall = take(), take(), int(), int(), int(), take(), int()
  local spec, summary, digest = take(), take(), take()
  local runs_max, bytes_max, events_max, run_bytes_max, kept = int(), int(), int(), int(), int()
  local events, size = rest()
  size = size + RUN_OVERHEAD + #spec + #summary
  local asked = P .. 'runs:request:' .. request
  local when, which = string.match(call('GET', asked) or '', '^(%d+) (.+)$')
  if not when or now - when >= DEDUP_MS or not exists(which) then which = id end
  if exists(which) then return {'OK', 1, which, row(which, WHOLE)} end
  if session ~= '' then
    local known = session_row(session)
    if not known then return {'SESSION_UNKNOWN'} end
    if known[7] ~= '' then return {'SESSION_BUSY'} end
  end
  if open_max > 0 and call('SCARD', COUNTED) >= open_max then return {'TOO_MANY'} end
  if meta('open') >= runs_max then return {'RUNS_FULL', 'runs_open_max'} end
  if #events > events_max then return {'RUN_FULL', 'run_events_max'} end
  if size > run_bytes_max then return {'RUN_FULL', 'run_bytes_max'} end
  if not make_room(size, bytes_max, kept, false) then return {'RUNS_FULL', 'runs_bytes_max', room_in(size, bytes_max)} end
  if session ~= '' then session_touch(session, id) end
  call('HSET', run_key(id), 'phase', QUEUED, 'summary', summary, 'seq', #events, 'create', now, 'end', 0, 'cancelled', 0,
    'dstep', 0, 'session', session, 'priority', priority, 'decision', '', 'spec', spec, 'asked', digest, 'token', 0,
    'bytes', 0,
    'counted', active_max > 0 and 1 or 0, 'counts_open', open_max > 0 and 1 or 0, 'wall', wall > 0 and now + wall or 0)
  push(run_key(id) .. ':events', events)
  grow(id, size)
  call('HINCRBY', META, 'open', 1)
  if active_max > 0 then call('HSET', META, 'active_max', active_max) end
  call('ZADD', ALL, call('HINCRBY', META, 'n', 1), id)
  queue(id, priority, active_max > 0 and 1 or 0, 0)
  for _, key in ipairs({ALL, META, ENDED, WHOLE_RUNS}) do call('PERSIST', key) end
  call('SET', asked, string.format('%.0f %s', now, id), 'PX', DEDUP_MS)
  return {'OK', 0, id, row(id, WHOLE)}
end

if op == 'list' then
  local size, before, phase = int(), int(), take()
  local found, last, bytes = {}, 0, 0
  local ids = call('ZREVRANGEBYSCORE', ALL, before > 0 and '(' .. before or '+inf', '-inf', 'WITHSCORES', 'LIMIT', 0, SCAN_MAX + 1)
  for i = 1, #ids, 2 do
    if #found == size or i == 2 * SCAN_MAX + 1 or bytes >= PAGE_BYTES then return {'OK', last, found} end
    last = tonumber(ids[i + 1])
    local known = call('HGET', run_key(ids[i]), 'phase')
    if known and (phase == '0' or known == phase) then
      local fields = row(ids[i], BRIEF)
      bytes = bytes + #fields[2]
      found[#found + 1] = {ids[i], fields}
    end
  end
  return {'OK', 0, found}
end

if op == 'claim' then
  local holder, priority, most, lease, bytes_max, only_to_end = take(), int(), int(), int(), int(), int()
  local found, bytes, too_large = {}, 0, 0
  call('ZREMRANGEBYSCORE', ACTIVE, '-inf', now)
  overdue_to_end()
  for _, counted in ipairs(only_to_end == 1 and {TO_END} or {TO_END, 0, 1}) do
    local left = most - #found
    if counted == 1 then left = math.min(left, room()) end
    local ids = {}
    if left > 0 and too_large == 0 then ids = call('ZRANGEBYSCORE', line(priority, counted), '-inf', now, 'LIMIT', 0, left) end
    for _, id in ipairs(ids) do
      local key = run_key(id)
      local known, losses, wait = call('HGET', key, 'token'), losses_of(id, counted)
      if not known then -- deleted by somebody else: it must not stand in front of the others for ever
        call('ZREM', line(priority, counted), id)
      elseif wait > 0 then
        hold_back(id, priority, counted, losses, wait)
      else
        bytes = bytes + call('HSTRLEN', key, 'spec') + call('HSTRLEN', key, 'summary') + call('HSTRLEN', key, 'decision')
        if bytes_max > 0 and bytes > bytes_max then
          too_large = 1
          break
        end
        local token = math.max(known + 1, now)
        call('HSET', key, 'phase', RUNNING, 'token', token, 'holder', holder, 'losses', losses)
        call('ZADD', line(priority, counted), now + lease, id)
        if counted == 1 then call('ZADD', ACTIVE, now + lease, id) end
        call('ZREM', WALL, id)
        found[#found + 1] = {id, token, row(id, WHOLE), counted == TO_END and 1 or 0, losses}
      end
    end
  end
  return {'OK', due_of(priority) or -1, too_large, found}
end

if op == 'renew' then
  local lease, states = int(), {}
  for i = at + 1, #ARGV, 2 do
    local id, state = ARGV[i], 0
    local phase, token, priority, counted, cancelled = read(id, 'phase', 'token', 'priority', 'counted', 'cancelled')
    if phase == RUNNING and token == tonumber(ARGV[i + 1]) then
      local lapsed = counted == 1 and tonumber(call('ZSCORE', line(priority, 1), id) or now) <= now
      state = lapsed and room() <= 0 and 0 or 1
      if state == 0 then queue(id, priority, counted, cancelled) end
    end
    if state == 1 then
      call('ZADD', line(priority, counted), now + lease, id)
      if counted == 1 then call('ZADD', ACTIVE, now + lease, id) end
    end
    states[#states + 1] = {state, cancelled or 0}
  end
  return {'OK', states}
end

if op == 'dues' then return {'OK', dues()} end

local id = take()
if not exists(id) then return {'RUN_UNKNOWN'} end
local key = run_key(id)
local phase, seq, token, priority, counted, cancelled, bytes = read(id, 'phase', 'seq', 'token', 'priority', 'counted', 'cancelled', 'bytes')

if op == 'get' then return {'OK', row(id, WHOLE)} end

if op == 'read' then
  local gone, created = read(id, 'gone', 'create')
  gone = gone or 0
  local first, most = math.max(int(), gone + 1), int()
  local found = page(key .. ':events', first - 1 - gone, math.max(seq - first + 1, 0), most)
  return {'OK', found, first - 1 + #found < seq and 1 or 0, phase > WAITING and 1 or 0, seq, first, created}
end

if op == 'position' then
  if phase ~= RUNNING or token ~= int() then return {'LEASE_LOST'} end
  return {'OK', seq, read(id, 'create')}
end

if op == 'cancel' then
  if phase > WAITING then return {'OK', row(id, WHOLE)} end
  call('HSET', key, 'cancelled', 1)
  if phase == RUNNING then
    if counted ~= TO_END then -- should its holder be lost. It leaves ACTIVE when that lease ends, or when it is given back
      local due = call('ZSCORE', line(priority, counted), id) or now
      call('ZREM', line(priority, counted), id)
      call('HSET', key, 'counted', TO_END)
      call('ZADD', line(priority, TO_END), due, id)
    end
    call('PUBLISH', 'sluice:{runs}:orders', call('HGET', key, 'holder') .. ' ' .. TENANT .. ' ' .. id)
  else
    queue(id, priority, counted, 1)
  end
  return {'OK', row(id, WHOLE)}
end

-- Why it may not grow so much, or nil.
local function full(growth, more_events, bytes_max, events_max, run_bytes_max, kept)
  if seq + more_events > events_max then return {'RUN_FULL', 'run_events_max'} end
  if growth <= 0 then return nil end
  if bytes + growth > run_bytes_max then return {'RUN_FULL', 'run_bytes_max'} end
  if not make_room(growth, bytes_max, kept, true) then return {'RUN_FULL', 'runs_bytes_max'} end
  return nil
end

if op == 'resume' then
  local step, decision, request, asked = int(), take(), take(), take()
  local mark = key .. ':resume:' .. request
  local when, earlier = string.match(call('GET', mark) or '', '^(%d+) ?(.*)$')
  if when and now - when < DEDUP_MS then return reused(earlier, asked) and {'REUSED'} or {'OK', row(id, WHOLE)} end
  if phase ~= WAITING or tonumber(call('HGET', key, 'wait')) ~= step then return {'NOT_WAITING'} end
  local problem = full(#decision, 0, int(), int(), int(), int())
  if problem then return problem end
  grow(id, #decision)
  call('HSET', key, 'decision', decision, 'dstep', step)
  local wall, waits = read(id, 'wall', 'waits')
  if wall and wall > 0 then call('HSET', key, 'wall', wall + now - waits) end -- waiting is not counted
  call('SET', mark, string.format('%.0f %s', now, asked), 'PX', DEDUP_MS)
  queue(id, priority, counted, cancelled)
  return {'OK', row(id, WHOLE)}
end

if op == 'append' then
  local given, expected, append_id, summary, to, ready, wait = int(), int(), take(), take(), int(), int(), int()
  local bytes_max, events_max, run_bytes_max, kept = int(), int(), int(), int()
  local session_limits, number = {int(), int(), int()}, int()
  local events, growth = {}, 0
  for i = 1, number do
    events[i] = take()
    growth = growth + #events[i] + MESSAGE_OVERHEAD
  end
  local messages, size = rest()
  if call('HGET', key, 'append') == append_id then return {'OK', seq, {}, 0} end
  if phase ~= RUNNING or token ~= given then return {'LEASE_LOST'} end
  if seq ~= expected then return {'VERSION'} end
  if summary ~= '' then growth = growth + #summary - call('HSTRLEN', key, 'summary') end
  if number > 0 then growth = growth - call('HSTRLEN', key, 'decision') end
  if to <= WAITING then
    local problem = full(growth, number, bytes_max, events_max, run_bytes_max, kept)
    if problem then return problem end
  else
    local session = call('HGET', key, 'session')
    local known = session ~= '' and call('HGET', session_key(session), 'open') == id
    if known then
      if #messages > 0 then sessions_drop_expired() end
      local problem = #messages > 0 and session_add(session, messages, size, session_limits, 0)
      if problem then return problem end
      session_touch(session, '')
    elseif session ~= '' and #messages > 0 then
      return {'SESSION_UNKNOWN'}
    end
  end
  push(key .. ':events', events)
  grow(id, growth)
  local fields = {'seq', seq + number, 'append', append_id}
  if summary ~= '' then fields[#fields + 1] = 'summary'; fields[#fields + 1] = summary end
  if number > 0 then for _, one in ipairs({'decision', '', 'dstep', 0, 'losses', 0}) do fields[#fields + 1] = one end end
  call('HSET', key, unpack(fields))
  call('PUBLISH', key, seq + number)
  if to == RUNNING then return {'OK', seq + number, {}, 0} end

  call('ZREM', ACTIVE, id)
  if to == QUEUED or cancelled == 1 and to <= WAITING then
    queue(id, priority, counted, cancelled)
  elseif to == PAUSED then
    call('HSET', key, 'phase', PAUSED)
    call('ZADD', line(priority, counted), math.max(ready, now), id)
    note_wall(id, counted)
  else
    call('HSET', key, 'phase', to, 'wait', wait, 'waits', now)
    call('ZREM', line(priority, counted), id)
    call('SREM', COUNTED, id)
  end
  if to > WAITING then
    call('HSET', key, 'end', now)
    local held = call('HGET', key, 'bytes')
    call('HINCRBY', META, 'ended', held)
    call('ZADD', ENDED, now, held .. ':' .. id)
    call('ZADD', WHOLE_RUNS, now, id)
    for _, one in ipairs({key, key .. ':events'}) do call('PEXPIRE', one, kept) end
    drop_old(kept)
    if call('HINCRBY', META, 'open', -1) == 0 then
      for _, one in ipairs({ALL, META, ENDED, WHOLE_RUNS}) do call('PEXPIRE', one, kept + KEY_SLACK_MS) end
    end
  end
  return {'OK', seq + number, dues()}
end
