"""One feature out of a tf.train.Example, against Google's own reader of the format."""

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st
from serialized import example, feature, field, numbers_feature, varint

from dpftrl.errors import InvalidInput
from dpftrl.tasks.stackoverflow import bytes_feature

Field = descriptor_pb2.FieldDescriptorProto


def _declare() -> descriptor_pb2.FileDescriptorProto:
    """Return the message types of tf.train, as TensorFlow declares them."""
    file = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tensorflow", syntax="proto3"
    )

    def message(name: str, *fields: tuple[str, int, int, int, str | None]) -> None:
        message_type = file.message_type.add(name=name)
        for label, number, kind, repeated, of in fields:
            message_type.field.add(
                name=label, number=number, type=kind, label=repeated, type_name=of
            )

    one, many = Field.LABEL_OPTIONAL, Field.LABEL_REPEATED
    message("BytesList", ("value", 1, Field.TYPE_BYTES, many, None))
    message("FloatList", ("value", 1, Field.TYPE_FLOAT, many, None))
    message("Int64List", ("value", 1, Field.TYPE_INT64, many, None))
    message(
        "Feature",
        ("bytes_list", 1, Field.TYPE_MESSAGE, one, ".tensorflow.BytesList"),
        ("float_list", 2, Field.TYPE_MESSAGE, one, ".tensorflow.FloatList"),
        ("int64_list", 3, Field.TYPE_MESSAGE, one, ".tensorflow.Int64List"),
    )
    kinds = file.message_type[-1]
    kinds.oneof_decl.add(name="kind")
    for field_type in kinds.field:
        field_type.oneof_index = 0
    entry = ".tensorflow.Features.FeatureEntry"
    message("Features", ("feature", 1, Field.TYPE_MESSAGE, many, entry))
    pair = file.message_type[-1].nested_type.add(name="FeatureEntry")
    pair.options.map_entry = True
    pair.field.add(name="key", number=1, type=Field.TYPE_STRING, label=one)
    pair.field.add(
        name="value", number=2, type=Field.TYPE_MESSAGE, label=one, type_name=".tensorflow.Feature"
    )
    message("Example", ("features", 1, Field.TYPE_MESSAGE, one, ".tensorflow.Features"))
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_declare())
Example = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("tensorflow.Example"))

VALUES = st.one_of(
    st.lists(st.binary(max_size=200), max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
)
NAMES = st.sampled_from(["tokens", "token", "my tokens", "score", "", "é"])


def as_google_writes(features: dict[str, list]) -> bytes:
    message = Example()
    for name, values in features.items():
        feature_ = message.features.feature[name]
        kind = {int: "int64_list", float: "float_list"}.get(
            type((values or [b""])[0]), "bytes_list"
        )
        getattr(feature_, kind).value.extend(values)
    return message.SerializeToString()


@given(st.dictionaries(NAMES, VALUES, max_size=6), NAMES)
def test_it_reads_what_google_writes(features, name):
    wanted = features.get(name, [])
    expected = [value for value in wanted if isinstance(value, bytes)]
    assert bytes_feature(as_google_writes(features), name.encode()) == expected


@given(st.text(max_size=400))
def test_google_reads_what_the_tests_assemble(text):
    message = Example.FromString(example(text))
    assert message.features.feature["tokens"].bytes_list.value == [text.encode()]
    assert message.features.feature["score"].int64_list.value == [6]
    assert bytes_feature(example(text), b"tokens") == [text.encode()]


def test_the_last_of_two_equal_keys_counts():
    twice = field(1, feature("tokens", b"old") + feature("tokens", b"new"))
    apart = field(1, feature("tokens", b"old")) + field(1, feature("tokens", b"new"))
    names = field(1, b"title") + field(1, b"tokens")
    keys = field(1, field(1, names + field(2, field(1, field(1, b"new")))))
    for content in (twice, apart, keys):
        assert Example.FromString(content).features.feature["tokens"].bytes_list.value == [b"new"]
        assert bytes_feature(content, b"tokens") == [b"new"]


def test_unknown_fields_are_skipped():
    unknown = varint(9 << 3) + varint(2**63) + varint(10 << 3 | 1) + bytes(8)
    unknown += varint(11 << 3 | 5) + bytes(4) + field(12, b"?")
    content = unknown + field(1, unknown + feature("tokens", b"hello")) + unknown
    assert Example.FromString(content).features.feature["tokens"].bytes_list.value == [b"hello"]
    assert bytes_feature(content, b"tokens") == [b"hello"]


def test_a_feature_of_numbers_has_no_bytes():
    assert bytes_feature(field(1, numbers_feature("tokens", 1, 300)), b"tokens") == []


@given(st.data(), st.text(min_size=1, max_size=20))
def test_a_truncated_example_is_refused(data, text):
    whole = field(1, feature("tokens", text.encode()))
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(InvalidInput, match=r"not a serialised tf\.train\.Example"):
        bytes_feature(whole[:cut], b"tokens")


@given(st.binary(max_size=60))
def test_random_bytes_are_parsed_or_refused(content):
    try:
        values = bytes_feature(content, b"tokens")
    except InvalidInput:
        return
    assert all(isinstance(value, bytes) for value in values)


@pytest.mark.parametrize("content", [b"\x0b", b"\x80" * 10, b"\x0d\0", b"\x0a\xff\xff\xff\xff\x7f"])
def test_malformed_examples_are_refused(content):
    with pytest.raises(InvalidInput):
        bytes_feature(content, b"tokens")
