from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetLoadRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("instance", "num_running", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_steps")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    num_running: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_steps: int
    def __init__(self, instance: _Optional[str] = ..., num_running: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_steps: _Optional[int] = ...) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "workers", "kv_cache_usage", "num_preemptions", "num_prefix_cache_queries", "num_prefix_cache_hits", "num_chunked_prefills", "num_prompt_tokens", "num_output_tokens", "num_finished", "num_aborted", "num_rejected", "num_block_copies", "num_open_streams", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_stale_draft_tokens", "num_late_drafts", "num_accepted_tokens_per_position")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKED_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STALE_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    kv_cache_usage: float
    num_preemptions: int
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    num_chunked_prefills: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_finished: int
    num_aborted: int
    num_rejected: int
    num_block_copies: int
    num_open_streams: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_stale_draft_tokens: int
    num_late_drafts: int
    num_accepted_tokens_per_position: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ..., kv_cache_usage: _Optional[float] = ..., num_preemptions: _Optional[int] = ..., num_prefix_cache_queries: _Optional[int] = ..., num_prefix_cache_hits: _Optional[int] = ..., num_chunked_prefills: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_aborted: _Optional[int] = ..., num_rejected: _Optional[int] = ..., num_block_copies: _Optional[int] = ..., num_open_streams: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_stale_draft_tokens: _Optional[int] = ..., num_late_drafts: _Optional[int] = ..., num_accepted_tokens_per_position: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "label")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    label: str
    def __init__(self, request_id: _Optional[str] = ..., label: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: float
    def __init__(self, timeout: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_open_streams",)
    NUM_OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    num_open_streams: int
    def __init__(self, num_open_streams: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("lora_name", "lora_path", "model")
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    lora_path: str
    model: str
    def __init__(self, lora_name: _Optional[str] = ..., lora_path: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("lora_name", "model")
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    model: str
    def __init__(self, lora_name: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
