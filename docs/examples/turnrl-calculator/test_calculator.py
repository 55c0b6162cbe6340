from turnrl_calculator import Calculator

from turnrl import ToolCall
from turnrl.testing import check_tool


def test_the_calculator_keeps_to_the_contract():
    check_tool(
        Calculator(),
        good_calls=[{"expression": "(3 + 4) * 2.5"}, {"expression": " -7 // 2"}],
        bad_calls=[
            {"expression": "1 / 0"},
            {"expression": "2 **"},
            {"expression": "9 ** 9 ** 9"},
            {"expression": "__import__('os')"},
            {"expression": "(" * 90},
            {"expression": "1e308 * 10 // 1"},
            {"expression": 7},
            {},
        ],
    )


def test_results_are_exact_where_they_can_be():
    (whole, rounded) = Calculator(digits=3).run(
        [ToolCall("calculate", {"expression": e}) for e in ("12345678901234567890 * 10", "2 / 3")]
    )
    assert (whole.content, rounded.content) == ("123456789012345678900", "0.667")
