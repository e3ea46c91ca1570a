"""Jobs and files as they are stored, and as OpenAI's clients see them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
OVER: frozenset[str] = frozenset(("failed", "completed", "expired", "cancelled"))

# What a status may turn into. Everything else is a defect, or another service was quicker.
NEXT: dict[str, frozenset[str]] = {
    "validating": frozenset(("in_progress", "failed", "cancelling", "expired")),
    "in_progress": frozenset(("finalizing", "cancelling")),
    "finalizing": frozenset(("completed", "expired")),
    "cancelling": frozenset(("cancelled",)),
}


class LineError(msgspec.Struct, kw_only=True):
    """Why a batch was not begun: OpenAI's `BatchError`."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of all results together."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class Counts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Job(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A batch of either kind. Times are Unix seconds; 0: not yet."""

    id: str
    owner: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    priority: str = "low"
    name: str = ""  # what a NATS client calls it; empty for a batch made over HTTP
    packed: bool = False  # results go out as MessagePack, as the client's `open` came
    endpoint: str = ""
    model: str = ""
    models: list[str] | None = None  # those that its key may ask; None: all
    input_file_id: str = ""
    completion_window: str = ""
    output_expires_s: int = 0  # 0: as the service keeps everything
    metadata: dict[str, str] | None = None
    total: int = -1  # of its requests, once known
    loaded: bool = False  # its input file is in the queue
    closed_at: int = 0  # number of the client's `close`, in the stream of what clients send
    lapsed: bool = False  # its time was up before it was done
    in_progress_at: int = 0
    finalizing_at: int = 0
    completed_at: int = 0
    failed_at: int = 0
    expired_at: int = 0
    cancelling_at: int = 0
    cancelled_at: int = 0
    errors: list[LineError] = []
    output_file_id: str = ""
    error_file_id: str = ""
    counts: Counts = msgspec.field(default_factory=Counts)  # as last written; final once it is over
    usage: Usage | None = None
    keeper: str = ""  # the batch service that sees to it
    keeper_epoch: int = 0

    @property
    def over(self) -> bool:
        return self.status in OVER

    def enter(self, status: Status, now: int) -> None:
        """Changes the status and stamps the time.

        Raises:
            ValueError: this status cannot follow the present one.
        """
        if status not in NEXT.get(self.status, ()):
            raise ValueError(f"a {self.status} job does not become {status}")
        self.status = status
        setattr(self, f"{status}_at", now)


class File(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A file's record; its content lies in the object store under `part`."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    part: str
    expires_at: int = 0


def shown_file(file: File) -> dict[str, Any]:
    """OpenAI's `File` object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at or None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def shown_job(job: Job) -> dict[str, Any]:
    """OpenAI's `Batch` object."""
    usage = job.usage
    times = {
        name: getattr(job, name) or None
        for name in (
            "in_progress_at",
            "finalizing_at",
            "completed_at",
            "failed_at",
            "expired_at",
            "cancelling_at",
            "cancelled_at",
        )
    }
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model or None,
        "errors": {"object": "list", "data": job.errors} if job.errors else None,
        "input_file_id": job.input_file_id,
        "completion_window": job.completion_window,
        "status": job.status,
        "output_file_id": job.output_file_id or None,
        "error_file_id": job.error_file_id or None,
        "created_at": job.created_at,
        "expires_at": job.expires_at,
        **times,
        "request_counts": job.counts,
        "usage": None
        if usage is None
        else {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
        "metadata": job.metadata,
    }
