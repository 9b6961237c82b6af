"""Messages of KServe's gRPC protocol, built from a table without a .proto compiler.

Names, numbers and types are those of the Open Inference Protocol's `inference` package and of
Triton's additions to it. Unused fields are left out, and skipped on input.
The messages have a separate descriptor pool, so that a client can run in the same process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
_Field = descriptor_pb2.FieldDescriptorProto

# A field: number, type, name; * is repeated, % a map from names, ? a oneof.
_MESSAGES = {
    "ServerLiveRequest": "", "ServerLiveResponse": "1 bool live",
    "ServerReadyRequest": "", "ServerReadyResponse": "1 bool ready",
    "ModelReadyRequest": "1 string name, 2 string version",
    "ModelReadyResponse": "1 bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 string name, 2 string version, 3 *string extensions",
    "ModelMetadataRequest": "1 string name, 2 string version",
    "ModelMetadataResponse":
        "1 string name, 2 *string versions, 3 string platform, 4 *TensorMetadata inputs, "
        "5 *TensorMetadata outputs",
    "TensorMetadata": "1 string name, 2 string datatype, 3 *int64 shape",
    "ModelConfigRequest": "1 string name, 2 string version",
    "ModelConfigResponse": "1 ModelConfig config",
    "ModelConfig":
        "1 string name, 2 string platform, 4 int32 max_batch_size, 5 *ModelInput input, "
        "6 *ModelOutput output, 17 string backend, "
        "19 ModelTransactionPolicy model_transaction_policy",
    "ModelInput": "1 string name, 2 int32 data_type, 4 *int64 dims, 8 bool optional",
    "ModelOutput": "1 string name, 2 int32 data_type, 3 *int64 dims",
    "ModelTransactionPolicy": "1 bool decoupled",
    "InferParameter":
        "1 ?bool bool_param, 2 ?int64 int64_param, 3 ?string string_param, "
        "4 ?double double_param, 5 ?uint64 uint64_param",
    "InferTensorContents":
        "1 *bool bool_contents, 2 *int32 int_contents, 3 *int64 int64_contents, "
        "4 *uint32 uint_contents, 5 *uint64 uint64_contents, 6 *float fp32_contents, "
        "7 *double fp64_contents, 8 *bytes bytes_contents",
    "InferInputTensor":
        "1 string name, 2 string datatype, 3 *int64 shape, 4 %InferParameter parameters, "
        "5 InferTensorContents contents",
    "InferRequestedOutputTensor": "1 string name, 2 %InferParameter parameters",
    "InferOutputTensor": "1 string name, 2 string datatype, 3 *int64 shape",
    "ModelInferRequest":
        "1 string model_name, 2 string model_version, 3 string id, 4 %InferParameter parameters, "
        "5 *InferInputTensor inputs, 6 *InferRequestedOutputTensor outputs, "
        "7 *bytes raw_input_contents",
    "ModelInferResponse":
        "1 string model_name, 2 string model_version, 3 string id, 4 %InferParameter parameters, "
        "5 *InferOutputTensor outputs, 6 *bytes raw_output_contents",
    "ModelStreamInferResponse": "1 string error_message, 2 ModelInferResponse infer_response",
}  # fmt: skip


def _entry(message: descriptor_pb2.DescriptorProto, name: str, kind: str) -> str:
    """Add the nested message of a map's entries; return its type name."""
    entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
    entry.options.map_entry = True
    _add(entry, "1 string key")
    _add(entry, f"2 {kind} value")
    return f".{PACKAGE}.{message.name}.{entry.name}"


def _add(message: descriptor_pb2.DescriptorProto, text: str) -> None:
    number, kind, name = text.split()
    mark = kind[0] if kind[0] in "*%?" else ""
    kind = kind.removeprefix(mark)
    made = message.field.add(name=name, number=int(number))
    made.label = _Field.LABEL_REPEATED if mark in ("*", "%") else _Field.LABEL_OPTIONAL
    if mark == "%":
        made.type_name = _entry(message, name, kind)
    elif kind in _MESSAGES:
        made.type_name = f".{PACKAGE}.{kind}"
    if made.type_name:
        made.type = _Field.TYPE_MESSAGE
    else:
        made.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    if mark == "?":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        made.oneof_index = 0


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="edgellm_kserve.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in filter(None, fields.split(", ")):
            _add(message, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in _MESSAGES
    }


MESSAGES: dict[str, Any] = _classes()  # message classes by name
