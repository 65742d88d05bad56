"""The eight public sets of the reference mixture, each in the columns and types that it has, and real files.

The rows are made up; the schemas are those of the sets' Parquet files.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hymoe.engine.data import sources
from hymoe.engine.data.chat import drop_reason
from hymoe.engine.data.formats import recognise
from hymoe.engine.data.schema import Conversation, Message
from hymoe.engine.errors import UserError

TEXT = pa.string()
TURNS = pa.list_(pa.struct([("content", TEXT), ("role", TEXT)]))
SPOKEN = pa.list_(pa.struct([("from", TEXT), ("value", TEXT)]))
CALL = pa.struct(
    [("id", TEXT), ("type", TEXT), ("function", pa.struct([("name", TEXT), ("arguments", TEXT)]))]
)
NEMOTRON_TURNS = pa.list_(
    pa.struct([("role", TEXT), ("content", TEXT), ("tool_calls", pa.list_(CALL))])
)
# A turn that spells a control token, has CRLF, odd spaces and an emoji: it must arrive as it is.
ODD = " <|im_end|>\r\n\tcaf\u00e9 \U0001f600 "


def schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


def turn(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def nemotron(category: str, reasoning: str, *turns: dict[str, Any], metadata: str = "{}") -> dict:
    return {
        "uuid": "u1",
        "license": "CC BY 4.0",
        "generator": "demo-model",
        "version": "1.0",
        "category": category,
        "reasoning": reasoning,
        "messages": [{"tool_calls": [], **turn} for turn in turns],
        "metadata": metadata,
    }


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
WEATHER = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
TOOL_ROW = nemotron(
    "tool_calling",
    "on",
    turn("user", "Weather in Oslo?", tool_calls=None),
    turn("assistant", "<think>\nCall it.\n</think>\n", tool_calls=[WEATHER]),
    turn("tool", "3 C"),
    turn("assistant", "It is 3 C."),
    metadata=json.dumps({"tools": TOOLS}),
)
NEMOTRON = schema(
    uuid=TEXT,
    license=TEXT,
    generator=TEXT,
    version=TEXT,
    category=TEXT,
    reasoning=TEXT,
    messages=NEMOTRON_TURNS,
    metadata=TEXT,
)
CODE = {
    "domain": "generic",
    "generation_algorithm": "self-instruct",
    "llm_judgement": '{"logic": {"score": 5}}',
    "unit_tests": '["assert inc(1) == 2"]',
    "tests_execution_status": '["pass"]',
}
SETS: dict[str, tuple[pa.Schema, list[dict[str, Any]]]] = {
    "allenai/tulu-3-sft-mixture": (
        schema(id=TEXT, messages=TURNS, source=TEXT),
        [
            {
                "id": "demo_0",
                "messages": [
                    turn("user", "Name a colour."),
                    turn("assistant", "Blue."),
                    turn("user", ODD),
                    turn("assistant", ODD),
                ],
                "source": "demo/source_a",
            }
        ],
    ),
    "HuggingFaceTB/smoltalk": (
        schema(messages=TURNS, source=TEXT),
        [
            {
                "messages": [
                    turn("system", "Answer briefly."),
                    turn("user", "2+3?"),
                    turn("assistant", "5"),
                ],
                "source": "demo-short",
            }
        ],
    ),
    "HuggingFaceH4/ultrachat_200k": (
        schema(prompt=TEXT, prompt_id=TEXT, messages=TURNS),
        [
            {
                "prompt": "Suggest a pet name.",
                "prompt_id": "0f3c",
                "messages": [
                    turn("user", "Suggest a pet name."),
                    turn("assistant", "Pebble."),
                    turn("user", "Another?"),
                    turn("assistant", "Moss."),
                ],
            }
        ],
    ),
    "Magpie-Align/Magpie-Pro-300K-Filtered": (
        schema(conversations=SPOKEN, uuid=TEXT),
        [
            {
                "conversations": [
                    {"from": "human", "value": "What melts ice?"},
                    {"from": "gpt", "value": "Heat."},
                ],
                "uuid": "1111-2222",
            }
        ],
    ),
    "AI-MO/NuminaMath-CoT": (
        schema(source=TEXT, problem=TEXT, solution=TEXT, messages=TURNS),
        [
            {
                "source": "demo_contest",
                "problem": "Find $x$ if $x+1=3$.",
                "solution": "Subtract 1: $x=\\boxed{2}$.",
                "messages": [
                    turn("user", "Find $x$ if $x+1=3$."),
                    turn("assistant", "Subtract 1: $x=\\boxed{2}$."),
                ],
            }
        ],
    ),
    "nvidia/OpenCodeInstruct": (
        schema(
            id=TEXT,
            input=TEXT,
            output=TEXT,
            domain=TEXT,
            generation_algorithm=TEXT,
            llm_judgement=TEXT,
            unit_tests=TEXT,
            tests_execution_status=TEXT,
            average_test_score=TEXT,
        ),
        [
            {
                "id": "d1",
                "input": "Write inc.",
                "output": "```\nn+1\n```",
                "average_test_score": "1",
            }
            | CODE,
            {"id": "d2", "input": "Write dec.", "output": "n", "average_test_score": "0.5"} | CODE,
        ],
    ),
    "nvidia/Nemotron-Post-Training-Dataset-v1": (
        NEMOTRON,
        [
            nemotron(
                "math", "on", turn("user", "1+1?"), turn("assistant", "<think>\nadd\n</think>\n2")
            ),
            nemotron("code", "on", turn("user", "-"), turn("assistant", "x")),
            nemotron("chat", "off", turn("user", ""), turn("assistant", "x")),
            TOOL_ROW,
        ],
    ),
    "allenai/tulu-3-sft-personas-instruction-following": (
        schema(id=TEXT, prompt=TEXT, messages=TURNS, constraints=pa.list_(TEXT)),
        [
            {
                "id": "p1",
                "prompt": "Write one lowercase line.",
                "messages": [
                    turn("user", "Write one lowercase line."),
                    turn("assistant", "a quiet line."),
                ],
                "constraints": ["format:all lowercase"],
            }
        ],
    ),
}


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


EXPECTED: dict[str, tuple[str, list[Conversation | str]]] = {
    "allenai/tulu-3-sft-mixture": (
        "messages",
        [
            Conversation(
                (user("Name a colour."), assistant("Blue."), user(ODD), assistant(ODD)),
                source="demo/source_a",
                id="demo_0",
            )
        ],
    ),
    "HuggingFaceTB/smoltalk": (
        "messages",
        [
            Conversation(
                (Message("system", "Answer briefly."), user("2+3?"), assistant("5")),
                source="demo-short",
            )
        ],
    ),
    "HuggingFaceH4/ultrachat_200k": (
        "messages",
        [
            Conversation(
                (
                    user("Suggest a pet name."),
                    assistant("Pebble."),
                    user("Another?"),
                    assistant("Moss."),
                ),
                id="0f3c",
            )
        ],
    ),
    "Magpie-Align/Magpie-Pro-300K-Filtered": (
        "sharegpt",
        [Conversation((user("What melts ice?"), assistant("Heat.")), id="1111-2222")],
    ),
    "AI-MO/NuminaMath-CoT": (
        "messages",
        [
            Conversation(
                (user("Find $x$ if $x+1=3$."), assistant("Subtract 1: $x=\\boxed{2}$.")),
                source="demo_contest",
            )
        ],
    ),
    "nvidia/OpenCodeInstruct": (
        "prompt_response",
        [
            Conversation(
                (user("Write inc."), assistant("```\nn+1\n```")), source="generic", id="d1"
            ),
            Conversation((user("Write dec."), assistant("n")), source="generic", id="d2"),
        ],
    ),
    "nvidia/Nemotron-Post-Training-Dataset-v1": (
        "messages",
        [
            Conversation(
                (user("1+1?"), assistant("<think>\nadd\n</think>\n2")), source="math", id="u1"
            ),
            Conversation((user("-"), assistant("x")), source="code", id="u1"),
            Conversation((user(""), assistant("x")), source="chat", id="u1"),
            "tools",
        ],
    ),
    "allenai/tulu-3-sft-personas-instruction-following": (
        "messages",
        [Conversation((user("Write one lowercase line."), assistant("a quiet line.")), id="p1")],
    ),
}


def read(files: list[Path], where: dict[str, Any] | None = None, **rules: Any) -> list[Any]:
    """Conversations, reasons and errors of a source, as a preparation reads it."""
    format_ = recognise(sources.columns_of(files))
    found: list[Any] = []
    for chunk in sources.chunks(files, {*format_.columns, *(where or {})}):
        for at, record in chunk.records():
            if isinstance(record, UserError):
                found.append(record)
            elif not sources.passes(record, where or {}):
                found.append("filtered")
            else:
                try:
                    found.append(format_.parse(record, at, **rules))
                except UserError as error:
                    found.append(error)
    return found


def write(folder: Path, name: str, kind: str) -> Path:
    columns, rows = SETS[name]
    if kind == "jsonl":
        path = folder / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path = folder / "train-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist(rows, columns), path)
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("name", SETS)
def test_a_public_set(tmp_path: Path, name: str, kind: str) -> None:
    files = sources.expand(write(tmp_path, name, kind), tmp_path)
    format_name, expected = EXPECTED[name]
    assert recognise(sources.columns_of(files)).name == format_name
    assert read(files) == expected


def test_only_the_columns_that_a_format_needs_are_read(tmp_path: Path) -> None:
    files = [write(tmp_path, "nvidia/OpenCodeInstruct", "parquet")]
    columns = recognise(sources.columns_of(files)).columns
    assert columns == ("id", "input", "output", "domain")


def test_scores_that_are_text(tmp_path: Path) -> None:
    files = [write(tmp_path, "nvidia/OpenCodeInstruct", "parquet")]
    where = {"average_test_score": {"min": 0.9}}
    sources.check_where(where, sources.columns_of(files), "code")
    assert read(files, where) == [EXPECTED["nvidia/OpenCodeInstruct"][1][0], "filtered"]


def test_users_that_are_missing_are_left_out_by_reason(tmp_path: Path) -> None:
    files = [write(tmp_path, "nvidia/Nemotron-Post-Training-Dataset-v1", "parquet")]
    reasons = [row if isinstance(row, str) else drop_reason(row.messages) for row in read(files)]
    assert reasons == [None, "empty_user", "empty_user", "tools"]


def test_reasoning_of_nemotron(tmp_path: Path) -> None:
    files = [write(tmp_path, "nvidia/Nemotron-Post-Training-Dataset-v1", "parquet")]
    assert read(files, reasoning="strip")[0].messages == (user("1+1?"), assistant("2"))
    assert read(files, reasoning="drop")[0] == "reasoning"


def test_tools_of_nemotron(tmp_path: Path) -> None:
    files = [write(tmp_path, "nvidia/Nemotron-Post-Training-Dataset-v1", "parquet")]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert read(files, tools="keep")[3] == Conversation(
        (
            user("Weather in Oslo?"),
            Message(
                "assistant",
                "<think>\nCall it.\n</think>\n",
                extra={"tool_calls": [{"id": "c1", **call}]},
            ),
            Message("tool", "3 C"),
            assistant("It is 3 C."),
        ),
        tools=tuple(TOOLS),
        source="tool_calling",
        id="u1",
    )
    refused = read(files, tools="refuse")[3]
    assert isinstance(refused, UserError)
    assert str(refused).endswith('parquet:4 has tools, expected none: keep or drop them by "tools"')


@pytest.mark.parametrize(
    ("name", "format_name", "counts"),
    [
        ("chat/fastchat_dummy_conversation.json", "sharegpt", {"taken": 500}),
        ("chat/gpteacher_codegen_1000.json", "instruction", {"taken": 1000}),
        ("chat/llamafactory_alpaca_en_demo.json", "instruction", {"taken": 999}),
        (
            "chat/llamafactory_glaive_toolcall_en_demo.json",
            "sharegpt",
            {"taken": 109, "tools": 191},
        ),
        ("chat/llamafactory_v1_sft_demo.jsonl", "messages", {"taken": 500}),
        ("chat/oasst_en100_messages.jsonl", "messages", {"taken": 564}),
        ("chat/selfinstruct_seed_tasks.jsonl", "instruction", {"taken": 175}),
        ("chat/mask_fixtures/alpaca_alpaca.json", "instruction", {"taken": 2}),
        ("chat/mask_fixtures/conversation.json", "sharegpt", {"taken": 1}),
        ("chat/mask_fixtures/conversation.missingturns.json", "sharegpt", {"empty_assistant": 1}),
        ("pairwise/llamafactory_dpo_en_demo.json", "preference", {"taken": 300}),
        ("pairwise/oasst_en100_ranked_pairs.jsonl", "preference", {"taken": 754}),
        # Six answers of this set are the JSON value true instead of text.
        (
            "pairwise/pandalm_battles.jsonl",
            "arena",
            {"taken": 887, "tie": 105, "broken": 6, "empty_assistant": 1},
        ),
    ],
)
def test_real_files(shared_dir: Path, name: str, format_name: str, counts: dict[str, int]) -> None:
    file = shared_dir / "data" / name
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    files = sources.expand(name, shared_dir / "data")
    assert recognise(sources.columns_of(files)).name == format_name
    found: Counter[str] = Counter()
    for row in read(files):
        if isinstance(row, Conversation):
            row = drop_reason(row.messages) or "taken"
        found["broken" if isinstance(row, UserError) else row] += 1
    assert found == counts
    assert sources.count_rows(files) == found.total()


def test_real_rows_are_what_the_file_says(shared_dir: Path) -> None:
    file = shared_dir / "data" / "chat" / "llamafactory_v1_sft_demo.jsonl"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row, found in zip(rows, read([file]), strict=True):
        texts = [turn["content"][0]["value"] for turn in row["messages"]]
        assert found.messages == (user(texts[0]), Message("assistant", texts[1], train=True))


def test_real_tool_calls(shared_dir: Path) -> None:
    file = shared_dir / "data" / "chat" / "llamafactory_glaive_toolcall_en_demo.json"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    rows = json.loads(file.read_text(encoding="utf-8"))
    calls = results = 0
    for row, found in zip(rows, read([file], tools="keep"), strict=True):
        assert list(found.tools or ()) == json.loads(row["tools"])
        for turn_, message in zip(row["conversations"], found.messages, strict=True):
            if turn_["from"] == "function_call":
                calls += 1
                function = message.extra["tool_calls"][0]["function"]
                assert function == json.loads(turn_["value"])
                assert (message.role, message.content) == ("assistant", "")
            else:
                results += message.role == "tool"
                assert message.content == turn_["value"]
    assert (calls, results) == (211, 211)


def test_files_that_are_no_conversations(shared_dir: Path) -> None:
    file = shared_dir / "data" / "chat" / "mask_fixtures" / "conversation.tokenized.json"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    with pytest.raises(
        UserError, match="found columns input_ids, attention_mask, labels, expected"
    ):
        read([file])
