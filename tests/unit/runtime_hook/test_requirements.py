"""Requirement expressions held against a host, and what is said to whom they fail."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprov.runtime_hook.errors import Refused
from gpuprov.runtime_hook.requirements import check, cuda_version_of_driver, require, version_key

HOST = {"driver": "550.163.01", "cuda": "12.4", "brand": "Tesla", "arch": "9.0"}
# As NVIDIA's images have it, shortened.
OF_AN_IMAGE = "cuda>=12.6 " + " ".join(
    f"brand={brand},driver>=470,driver<471" for brand in ("unknown", "grid", "tesla", "nvidia", "quadro")
)


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("", True),
        ("   ", True),
        (",", True),
        ("cuda=12.4", True),
        ("cuda=12.4.0", True),
        ("cuda=12.04", True),
        ("cuda=12", False),
        ("cuda!=12.4", False),
        ("cuda!=12", True),
        ("cuda<12.4", False),
        ("cuda<12.10", True),
        ("cuda<=12.4", True),
        ("cuda<=12.3", False),
        ("cuda>12.4", False),
        ("cuda>12.3.9", True),
        ("cuda>=12.4", True),
        ("cuda>=12.10", False),
        ("driver>=550.54.14", True),
        ("driver>=550.163.02", False),
        ("arch>=9", True),
        ("arch>9.0", False),
        ("brand=tesla", True),
        ("brand=GeForce", False),
        ("brand!=TESLA", False),
        ("brand!=geforce", True),
        # A comma binds tighter than a blank.
        ("cuda>=12,driver>=550", True),
        ("cuda>=12,driver<550", False),
        ("cuda>=13 driver>=550", True),
        ("cuda>=13 driver>=560", False),
        ("cuda>=13,driver>=550 brand=geforce cuda>=12,brand=tesla", True),
        ("cuda>=12.2  ,brand=tesla,", True),
        # What nobody knows is dropped.
        ("planet=earth", True),
        ("planet=earth,cuda>=13", False),
        # … and the other alternatives decide.
        ("cuda>=13 planet=earth", False),
        ("planet=earth cuda>=13", False),
        ("cuda>=12 planet=earth", True),
        ("cuda>=13 planet=earth driver>=550", True),
        ("planet=earth moon=one", True),
        ("planet=earth,moon=one cuda>=13", False),
        (", cuda>=13", False),
        (OF_AN_IMAGE, False),
    ],
)
def test_an_expression(expression: str, holds: bool) -> None:
    if holds:
        require([expression], HOST)
    else:
        with pytest.raises(Refused):
            require([expression], HOST)


@pytest.mark.parametrize(
    ("expressions", "state", "says"),
    [
        ([], "satisfied", ""),
        (["", " "], "satisfied", ""),
        (["cuda>=12", "driver>=550"], "satisfied", ""),
        (["planet=earth"], "satisfied", ""),
        (["cuda>=12", "driver>=560"], "violated", "requires driver>=560"),
        # Every condition is looked at, behind what holds and what fails too.
        (["cuda>=12 cuda==1"], "invalid", "'cuda==1' is no condition"),
        (["cuda>=99", "driver>=x"], "invalid", "'x' is no version"),
        (["cuda>=99,arch"], "invalid", "'arch' is no condition"),
        (["cuda>=12\tdriver>=550"], "invalid", "is no version"),
        (["cuda!12.4.0.0.0"], "invalid", "is no condition"),
        (["!12.4.0.0.0"], "invalid", "is no condition"),
    ],
)
def test_a_check_tells_violated_from_invalid(expressions: list[str], state: str, says: str) -> None:
    found, reason = check(expressions, HOST)
    assert found == state
    assert says in reason and bool(reason) is bool(says)


def test_an_image_runs_on_a_driver_that_one_of_its_alternatives_names() -> None:
    require([OF_AN_IMAGE], {"driver": "470.256.02", "cuda": "11.4", "brand": "Tesla"})


@pytest.mark.parametrize("name", ["cuda", "driver", "arch", "brand"])
def test_what_the_host_cannot_tell_is_not_held_against_it(name: str) -> None:
    require([f"{name}=99"], {key: value for key, value in HOST.items() if key != name})


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("cuda", "'cuda' is no condition such as cuda>=12.4"),
        ("cuda==12", "'cuda==12' is no condition"),
        ("cuda=>12", "is no condition"),
        ("cuda><12", "is no condition"),
        ("cuda!12", "is no condition"),
        (">=12", "is no condition"),
        ("cuda>=", "is no condition"),
        ("cuda>=x", "'x' is no version"),
        (f"cuda>={'9' * 5000}", "9' is no version"),
        ("cuda>=12.x", "no version"),
        ("cuda>=12.", "no version"),
        ("cuda>=-1", "no version"),
        ("driver>=٥٥٠", "no version"),
        ("brand>tesla", "brands are = or !="),
        # Wrong behind what fails already: the answer is about the wrong part, not a crash.
        ("driver>=999,cuda>=x", "'x' is no version"),
        ("driver>=999,cuda", "is no condition"),
    ],
)
def test_a_broken_expression_is_refused(expression: str, says: str) -> None:
    with pytest.raises(Refused, match=re.escape(says)):
        require([expression], HOST)


_UPDATE = "update the driver to ≥ {} or use an image for CUDA ≤ 12.4"
_IMAGE = "use another image, or NVIDIA_DISABLE_REQUIRE=1 if you know better"


@pytest.mark.parametrize(
    ("expression", "advice"),
    [
        ("cuda>=13.0", _UPDATE.format("580")),
        ("cuda=12.5", _UPDATE.format("555")),
        (OF_AN_IMAGE, _UPDATE.format("560")),
        ("cuda>=13.1", _UPDATE.format("590")),
        ("cuda>12.4", _UPDATE.format("555")),
        # The greater of two, and one alternative of two.
        ("cuda>=12.6,driver>=999", _UPDATE.format("999")),
        ("brand=geforce driver>=555.58", "update the driver to ≥ 555.58"),
        # A newer driver would not help.
        ("cuda>=13.0,brand=geforce", _IMAGE),
        ("driver<550", _IMAGE),
        ("driver=535.54.03", _IMAGE),
        ("driver=999", _IMAGE),
        ("cuda!=12.4", _IMAGE),
        ("arch>=10.0", _IMAGE),
        # The driver's CUDA is not what fails: no driver update is advised for it.
        ("cuda>=12.0,brand=geforce", _IMAGE),
        ("cuda=12.0", _IMAGE),
        ("cuda>=99", _IMAGE),
    ],
)
def test_a_refusal_says_what_to_do(expression: str, advice: str) -> None:
    with pytest.raises(Refused) as caught:
        require([expression], HOST)
    first, *others = expression.split()
    asked = [first, *others[:2], *([f"{len(others) - 2} more"] if len(others) > 2 else [])]
    said = f"requires {' or '.join(asked)}, this host's driver 550.163.01 supports 12.4: {advice}"
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ({"brand": "Tesla"}, "this host's driver ? supports ?:"),
        ({"brand": "Tesla", "driver": "550.1"}, "this host's driver 550.1 supports ?:"),
        ({"brand": "Tesla", "cuda": "12.4"}, "this host's driver ? supports 12.4:"),
    ],
)
def test_what_a_host_can_not_tell_is_a_question_mark(host: dict[str, str], says: str) -> None:
    with pytest.raises(Refused, match=re.escape(f"requires brand=geforce, {says}")):
        require(["brand=geforce"], host)


def test_an_alternative_of_unknown_properties_has_no_advice_to_give() -> None:
    with pytest.raises(Refused) as caught:
        require(["planet=earth cuda>=13.0"], HOST)
    assert str(caught.value).endswith(f"supports 12.4: {_UPDATE.format(580)}")


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("550.163.01", "12.4"),
        ("550.54.14", "12.4"),
        ("550.54.13", "12.3"),
        ("535.261.03", "12.2"),
        ("470.256.02", "11.4"),
        ("580.65.06", "13.0"),
        ("590.48.01", "13.1"),
        ("595.71.05", "13.2"),
        ("610.43.02", "13.3"),
        ("615.71.09", "13.4"),
        # Of a later branch than all that are known.
        ("616.00", ""),
        ("300.1", ""),
    ],
)
def test_cuda_version_of_a_driver(driver: str, cuda: str) -> None:
    assert cuda_version_of_driver(driver) == cuda


def test_components_compare_as_numbers_and_missing_ones_are_zero() -> None:
    assert version_key("12.10") > version_key("12.2") > version_key("12")
    assert version_key("012.2.0.0") == version_key("12.2")
    assert version_key(f"1.{'1' * 3999}")[0] == 1
    with pytest.raises(ValueError, match="is no version"):
        version_key(f"1.{'1' * 4000}")


_PIECES = st.sampled_from(
    ["cuda", "driver", "brand", "planet", ">", "<", "=", "!", ",", " ", ".", "12", "550", "x", "٣"]
)


@given(st.lists(_PIECES, max_size=12).map("".join) | st.text(max_size=20))
def test_no_expression_raises_anything_but_a_refusal(expression: str) -> None:
    try:
        require([expression], HOST)
    except Refused as refused:
        assert str(refused)
