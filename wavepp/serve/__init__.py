"""The HTTP server: OpenAI's API, and what operators need, in front of one engine a replica, on Ray
Serve. `serve run wavepp.serve:app_builder model=FOLDER` starts it, as does `wavepp serve`.
"""

from wavepp.serve.deployment import app_builder

__all__ = ["app_builder"]
