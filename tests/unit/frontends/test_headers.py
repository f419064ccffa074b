from loraplex.frontends.headers import headers_of


def test_by_lower_case_name_and_the_first_of_several():
    raw = [(b"x-a", b"1"), (b"x-b", b"\xe9"), (b"x-a", b"2")]
    headers = headers_of({"type": "http", "headers": raw})
    assert dict(headers) == {"x-a": "1", "x-b": "é"}


def test_they_are_read_once():
    scope = {"type": "http", "headers": [(b"x-a", b"1")]}
    assert headers_of(scope) is headers_of(scope)
