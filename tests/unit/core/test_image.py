"""Images as values: what is wrong with them, and messages that have none."""

import msgspec
import pytest

from loraplex.core.image import ImageSpan, images_problem
from loraplex.core.plan import EncodeImage, RowAdded, RowStep, StepPlan
from loraplex.core.task import Generate
from loraplex.memory.kv_salt import image_salts, salt_before
from support.engine_requests import engine_request

P = 9
DIGEST = bytes(range(32))
OTHER = bytes(range(1, 33))


def image(first: int, num_tokens: int = 2, digest: bytes = DIGEST) -> ImageSpan:
    return ImageSpan(first, num_tokens, digest, (1, 1, num_tokens))


@pytest.mark.parametrize(
    ("images", "named"),
    [
        ([image(1), image(3, 1)], []),
        ([image(1, 3), image(3, 1)], ["3"]),
        ([image(3, 1), image(1)], ["1"]),
        ([image(3, 2)], ["3", "9"]),
        ([image(4, 2)], ["4", "5"]),
        ([image(1, 0)], ["0"]),
        ([image(1, 4)], ["4"]),
        ([image(1, 1, b"short")], ["5", "32"]),
        ([image(0)], ["0", "9"]),
        ([image(-2, 2)], ["-2"]),
    ],
)
def test_problems_name_the_place_and_the_value(images: list[ImageSpan], named: list[str]) -> None:
    problem = images_problem(images, (1, P, P, P, 1), P, max_tokens=3)
    assert (problem is None) == (not named)
    assert all(word in (problem or "") for word in named)


def test_each_image_changes_the_salt_from_its_first_position_on() -> None:
    salts = image_salts(b"salt", [image(4), image(8)])
    assert [first for first, _ in salts] == [4, 8]
    assert salt_before(4, b"salt", salts) == b"salt"
    assert salt_before(5, b"salt", salts) == salts[0][1] == salt_before(8, b"salt", salts)
    assert salt_before(9, b"salt", salts) == salts[1][1]


@pytest.mark.parametrize(
    ("salt", "images"),
    [
        (b"other", [image(4)]),
        (b"salt", [image(5)]),
        (b"salt", [image(4, 3)]),
        (b"salt", [image(4, 2, OTHER)]),
        (b"salt", [image(2), image(4)]),
    ],
)
def test_whatever_differs_gives_another_salt(salt: bytes, images: list[ImageSpan]) -> None:
    assert image_salts(b"salt", [image(4)])[0][1] != image_salts(salt, images)[-1][1]


def test_messages_of_texts_name_no_images() -> None:
    plan = StepPlan(
        1,
        added=(RowAdded(0, 1, Generate(), 0, (1,), 1),),
        rows=(RowStep(0, 0, 1, (1,)),),
    )
    for message in (plan, engine_request((1,))):
        assert b"image" not in msgspec.json.encode(message)
        assert b"encode" not in msgspec.json.encode(message)


def test_messages_with_images_come_back() -> None:
    plan = StepPlan(
        1,
        added=(RowAdded(0, 1, Generate(), 0, (P, P), 2, images=(image(0),)),),
        rows=(RowStep(0, 0, 2, (P, P), image_cells=(3,)),),
        encodes=(EncodeImage(DIGEST, 3),),
    )
    assert msgspec.json.decode(msgspec.json.encode(plan), type=StepPlan) == plan
