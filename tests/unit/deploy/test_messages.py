import pytest

from loraplex.deploy.relay import called_path


@pytest.mark.parametrize(
    ("path", "prefix", "called"),
    [
        ("/v1/models", "", "/v1/models"),
        ("/llm/v1/models", "/llm", "/v1/models"),
        ("/llm/v1/models", "/llm/", "/v1/models"),
        ("/v1/models", "/llm", "/v1/models"),
        ("/llms/v1", "/llm", "/llms/v1"),
        ("/llm", "/llm", "/"),
        ("/v1/models/a?b", "", "/v1/models/a?b"),
    ],
)
def test_the_route_prefix_of_the_application_is_no_part_of_the_path(
    path: str, prefix: str, called: str
) -> None:
    assert called_path({"path": path, "root_path": prefix}) == called
