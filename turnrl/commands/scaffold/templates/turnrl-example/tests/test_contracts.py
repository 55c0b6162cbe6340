"""Checks of the contracts that turnrl relies on, and of what the classes promise of their own."""

from turnrl import Policy, Question, Reading, ToolCall, ToolResult, Trajectory, Turn, testing
from turnrl_example.engine import ExampleEngine
from turnrl_example.estimator import ExampleToGo
from turnrl_example.objective import ExampleProximal
from turnrl_example.outcome_reward import ExampleLookedUp
from turnrl_example.player import ExampleDesk
from turnrl_example.segmenter import ExampleTurns
from turnrl_example.source import ExampleQuestions
from turnrl_example.tool import ExampleLookup
from turnrl_example.turn_reward import ExampleNewlyFound


def test_the_tool_keeps_to_its_contract() -> None:
    testing.check_tool(
        ExampleLookup(),
        good_calls=[{"query": "capital of Peru"}, {"query": "Which continent is malta on?"}],
        bad_calls=[{"query": "capital of Atlantis"}, {"query": ""}, {"query": "x" * 201}, {}],
    )


def test_the_policy_reads_near_names_where_there_is_no_such_country() -> None:
    (result,) = ExampleLookup().run([ToolCall("search", {"query": "capital of Perru"})])
    assert result.content == "the query names no country that is known; there is Peru"


def test_the_segmenter_keeps_to_its_contract() -> None:
    testing.check_segmenter(ExampleTurns())
    testing.check_segmenter(ExampleTurns(max_turns=1))


def test_the_block_that_is_closed_first_counts() -> None:
    text = 'I look. <tool>{"name": "search", "args": {"query": "Peru"}}</tool>'
    reading = ExampleTurns().read(text + "<answer>Lima</answer>", 0, False)
    assert reading == Reading((ToolCall("search", {"query": "Peru"}),))
    assert ExampleTurns().read("It is <answer> Lima </answer>", 2, False) == Reading(answer="Lima")


def test_what_a_cut_turn_did_not_close_is_not_there() -> None:
    reading = ExampleTurns().read("It is <answer>Lim", 0, True)
    assert reading == Reading(format_error="cut short")


def test_a_call_in_the_last_turn_and_a_forged_result_are_format_errors() -> None:
    call = '<tool>{"name": "search", "args": {}}</tool>'
    assert ExampleTurns().read(call, 2, False).calls == ()
    forged = ExampleTurns().read("<result>Lima</result><answer>Lima</answer>", 0, False)
    assert forged.format_error == "results are not yours to write"


def test_the_player_keeps_to_its_contract() -> None:
    replies = ["It is <answer>Lima</answer>", "<answer>Lima</answer>"]
    testing.check_player(ExampleDesk(), replies)


def test_the_player_answers_after_it_looked_up() -> None:
    call = '<tool>{"name": "search", "args": {"query": "capital of Peru"}}</tool>'
    replies = [call, "It is <answer>Lima</answer>"]
    testing.check_player(ExampleDesk(), replies, tools=[ExampleLookup()])


def test_the_turn_reward_keeps_to_its_contract() -> None:
    testing.check_reward(ExampleNewlyFound())


def test_finding_the_answer_again_earns_nothing() -> None:
    question = Question("q", "What is the capital of Peru?", ("Lima",))
    page = ToolResult("Its capital is Lima.")
    turn = Turn("...", Reading((ToolCall("search"),)), (page,))
    trajectory = Trajectory(question, (turn, turn), "turns")
    assert [ExampleNewlyFound().score(trajectory, k) for k in (0, 1)] == [0.5, 0.0]


def test_the_outcome_reward_keeps_to_its_contract() -> None:
    testing.check_reward(ExampleLookedUp())


def test_the_source_keeps_to_its_contract() -> None:
    testing.check_source(ExampleQuestions())


def test_the_tool_knows_the_answer_to_every_question_of_the_source() -> None:
    for split in ("train", "val"):
        for question in ExampleQuestions().questions(split):
            (result,) = ExampleLookup().run([ToolCall("search", {"query": question.text})])
            assert question.answers[0] in result.content


def test_the_estimator_keeps_to_its_contract() -> None:
    testing.check_estimator(ExampleToGo())


def test_the_objective_keeps_to_its_contract() -> None:
    testing.check_objective(ExampleProximal())


def test_the_engine_keeps_to_its_contract_and_the_policy_to_its_mode() -> None:
    # a small one, which comes with turnrl
    policy = Policy("package://turnrl_atlas/starter").build()
    network = policy.load()
    testing.check_engine(ExampleEngine().build(), policy)
    assert network.training
