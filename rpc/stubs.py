"""The generated gRPC classes, imported in one place because they are untyped."""

from __future__ import annotations

from typing import Any

from diptych.rpc.v1 import decode_pb2_grpc, prefill_pb2_grpc, router_process_pb2_grpc, worker_pb2_grpc

WorkerStub: Any = worker_pb2_grpc.WorkerStub
PrefillStub: Any = prefill_pb2_grpc.PrefillStub
SourceStub: Any = prefill_pb2_grpc.SourceStub
DecodeStub: Any = decode_pb2_grpc.DecodeStub
LookasideStub: Any = decode_pb2_grpc.LookasideStub
RouterProcessStub: Any = router_process_pb2_grpc.RouterProcessStub
RouterParentStub: Any = router_process_pb2_grpc.RouterParentStub

add_worker: Any = worker_pb2_grpc.add_WorkerServicer_to_server
add_prefill: Any = prefill_pb2_grpc.add_PrefillServicer_to_server
add_source: Any = prefill_pb2_grpc.add_SourceServicer_to_server
add_decode: Any = decode_pb2_grpc.add_DecodeServicer_to_server
add_lookaside: Any = decode_pb2_grpc.add_LookasideServicer_to_server
add_router_process: Any = router_process_pb2_grpc.add_RouterProcessServicer_to_server
add_router_parent: Any = router_process_pb2_grpc.add_RouterParentServicer_to_server
