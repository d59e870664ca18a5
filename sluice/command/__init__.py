"""The `sluice` command: starts, stops, shows and calls a mesh on this machine.

No service imports this package. Where to look:

- What a mesh consists of: `topology` (every process; the same for this machine and for docker
compose), `compose` (renders docker-compose.yml from it). What is in `sluice.toml` is read by
`sluice.mesh_config`, Envoy's file is rendered by `sluice.edge`. - `sluice up`: `startup` is the
story; `preflight` checks, `first_files` makes keys and tenants, `readiness` waits (by `probe`),
`progress` and `up_screen` show, `question` asks. - What keeps it running: `supervisor`, a small
process of its own, with `backoff`, `run_files` (its plan and records), `log_files` (bounded logs).
- `sluice down`: `shutdown`, over `mesh_state` (what is there), `processes` (finding and ending
them) and `mark` (how they are marked). - The command line: `failures` (errors), `cli` with
`cli_calls`, `cli_show`, `cli_tenants` and `cli_fleet`; `client` calls the mesh through Envoy.
"""
