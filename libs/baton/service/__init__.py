"""What every process shares: its host, its heartbeat, its start and its end.

`base`    what a service is, and what its host gives it     `heart`  heartbeats, answers to `Ask`, snapshots
`process` signals, the supervising parent, the watchdog     `host`   `run_service`: from start to exit code
`figures` what the host itself measures
"""

from baton.service.base import Service, ServiceHost, StartupError
from baton.service.host import run_service

__all__ = ["Service", "ServiceHost", "StartupError", "run_service"]
