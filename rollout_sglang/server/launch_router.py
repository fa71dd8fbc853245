"""Start SGLang's router: `EVENKEEL_API_KEY=… python -m rollout_sglang.server.launch_router <its own arguments>`.

As rollout_sglang.server.launch_server: the key is not on the command line, and the router ends with its parent.
"""

from __future__ import annotations

import sys

from rollout_sglang.server.launch_server import arguments_with_key, die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(arguments_with_key(sys.argv[1:])))
