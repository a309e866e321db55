"""The pipeline on Ray: stage actors joined by one compiled graph, and a driver actor.

The only folder, with `serve/`, that imports ray. Ray reads the timeouts of compiled graphs when it
is imported, here and in every worker, and its defaults (10 s) end a graph whose stage takes longer;
so they are set before anything imports it. DriverCore's watchdog watches instead.
"""

from __future__ import annotations

import os

GRAPH_ENV = {
    "RAY_CGRAPH_submit_timeout": "10000000",
    "RAY_CGRAPH_get_timeout": "10000000",
    "RAY_CGRAPH_teardown_timeout": "10",
}

os.environ.update(GRAPH_ENV)
