"""Streams a completion over gRPC, with the generated stubs: python -m examples.stream_grpc [ADDRESS]"""

from __future__ import annotations

import sys
from typing import Any

import grpc

from protos.pageant.v1 import inference_pb2, inference_pb2_grpc

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with grpc.insecure_channel(address) as channel:
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    sampling = inference_pb2.SamplingParams(max_tokens=60, temperature=0.8, seed=7)
    request = inference_pb2.GenerateRequest(text="Once upon a time", sampling=sampling)
    for message in stub.Generate(request, timeout=60):
        print(message.text, end="", flush=True)
        if message.finish_reason:
            reason = inference_pb2.FinishReason.Name(message.finish_reason)
            print(f"\n{reason}, {message.usage.completion_tokens} tokens")
