"""Bytes that a client may send as JSON although they are invalid or larger than expected."""

from __future__ import annotations

DEEP = 900  # orjson reads it, and does not write it

RAW: dict[str, bytes] = {
    "nothing": b"",
    "spaces": b"  \n",
    "no JSON": b"hello",
    "half of it": b'{"a": ',
    "single quotes": b"{'a': 1}",
    "a comment": b'{"a": 1} // one',
    "two values": b"{}{}",
    "a comma too many": b'{"a": 1,}',
    "null": b"null",
    "a list": b"[]",
    "a number": b"0",
    "a text": b'"a"',
    "NaN": b'{"input": NaN, "messages": NaN, "reward": NaN}',
    "Infinity": b'{"input": -Infinity, "messages": Infinity}',
    "1e999": b'{"input": 1e999, "temperature": 1e999}',
    "5,000 digits": b'{"input": ' + b"7" * 5000 + b"}",
    "a large integer": b'{"input": 340282366920938463463374607431768211456, "max_output_tokens": 18446744073709551615}',
    "a lone surrogate": b'{"input": "\\ud800", "messages": []}',
    "a lone surrogate as a name": b'{"\\udfff": 1}',
    "half a surrogate pair in UTF-8": b'{"input": "\xed\xa0\x80"}',
    "no UTF-8": b'{"input": "\xff\xfe"}',
    "UTF-16": '{"input": "a"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"input": "a"}',
    "a null character": b'{"input": "\\u0000", "responses_create_params": {"input": "\\u0000"}, "response": {"output": []}}',
    "a bare control character": b'{"input": "\x01"}',
    "lists in lists": b'{"input": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "objects in objects": b'{"responses_create_params": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "objects in a row": b'{"responses_create_params": {"input": "a", "metadata": '
    + b'{"a":' * 230
    + b"1"
    + b"}" * 230
    + b'}, "response": {"output": []}}',
    "100,000 brackets": b"[" * 100_000,
    "100,000 lists": b'{"input": [' + b"[]," * 100_000 + b"[]]}",
    "a name of 1 MB": b'{"' + b"a" * 1_000_000 + b'": 1}',
    "one name twice": b'{"input": 1, "input": "a"}',
    "a prototype": b'{"__proto__": {"a": 1}, "constructor": {"prototype": {}}, "__class__": "x"}',
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab\xae\x05\x00C\xbf\xa6\xa3\x02\x00\x00\x00",
    "a form": b"a=1&b=2",
}
