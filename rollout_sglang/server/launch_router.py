"""Start SGLang's router: `EVENKEEL_API_KEY=… python -m rollout_sglang.server.launch_router ROUTER_ARGUMENTS…`."""

from __future__ import annotations

import sys

from rollout_sglang.server.launch_server import arguments_with_key

if __name__ == "__main__":
    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(arguments_with_key(sys.argv[1:])))
