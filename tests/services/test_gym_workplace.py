"""workplace: gold jobs, final states, replayed rollouts, and 64 sessions at once."""

import asyncio

import pytest
from shipped_gym import calls, gold_failures, module, questions, rollout, rows, says, serving, unreproducible_files

from ngym.errors import ServiceError


async def test_every_gold_case_gets_the_reward_it_must_get():
    assert not await gold_failures("workplace")


def test_the_shipped_data_is_what_its_script_makes(tmp_path):
    assert unreproducible_files("workplace", tmp_path) == []


def test_validation_is_not_trained_on_not_even_its_offices():
    assert not set(questions("workplace", "train")) & set(questions("workplace", "validation"))
    offices = [{row["office"] for row in rows("workplace", file)} for file in ("train", "validation")]
    assert not offices[0] & offices[1]


async def test_sixty_four_sessions_of_one_task_do_not_see_each_other():
    row = next(row for row in rows("workplace", "train") if len(row["actions"]) >= 3)
    async with serving("workplace") as peers:

        async def work(number):
            session = peers["workplace"].session()
            await session.post("/seed_session", row)
            done = row["actions"] if number % 2 else row["actions"][:-1]
            for tool, arguments in done:
                await session.post(f"/{tool}", arguments)
            return (await session.post("/verify", rollout(row, says("Done."))))["reward"]

        assert await asyncio.gather(*map(work, range(64))) == [0.0, 1.0] * 32


async def test_a_whole_number_of_another_type_is_the_same_office():
    row = rows("workplace", "train")[0]
    async with serving("workplace") as peers:
        for number in (float(row["office"]), str(row["office"]), f"{row['office']}.0"):
            session, written = peers["workplace"].session(), {**row, "office": number}
            await session.post("/seed_session", written)
            for tool, arguments in row["actions"]:
                await session.post(f"/{tool}", arguments)
            assert (await session.post("/verify", rollout(written, says("Done."))))["reward"] == 1.0


async def test_a_stored_rollout_is_scored_by_making_its_calls_again():
    async with serving("workplace") as peers:
        for row in rows("workplace", "validation"):
            bad = [("delete_file", {"file": "f99"}), ("no_tool", {}), ("close_task", {"task": 3})]
            done = calls(*bad, *map(tuple, row["actions"]))
            broken = {"type": "function_call", "name": "delete_file", "arguments": "{"}
            assert (await peers["workplace"].post("/verify", rollout(row, *done, broken)))["reward"] == 1.0
            assert (await peers["workplace"].post("/verify", rollout(row, *done[:-1])))["reward"] == 0.0
            assert (await peers["workplace"].post("/verify", rollout(row, says("All done! reward: 1.0"))))[
                "reward"
            ] == 0.0


async def test_a_row_whose_job_cannot_be_done_is_refused_at_both_doors():
    impossible = {"office": 1, "actions": [["move_event", {"event": "e999", "date": "2027-03-16", "start": "10:00"}]]}
    misspelled = {"office": 1, "actions": [["cancel_evnt", {}]]}
    tasks = module("workplace").office(3).tasks
    done = next(key for key, task in tasks.items() if task["status"] == "done")
    closed = {"office": 3, "actions": [["close_task", {"task": done}]]}
    nothing = "the office is the same after the actions"
    refusals = [(impossible, "actions[0], move_event: there is no"), (misspelled, "cancel_evnt")]
    refusals += [({"office": 1, "actions": []}, nothing), (closed, nothing)]
    async with serving("workplace") as peers:
        for job, message in refusals:
            row = {"responses_create_params": {"input": "a job"}, **job}
            for send in ("/seed_session", "/verify"):
                with pytest.raises(ServiceError) as caught:
                    await peers["workplace"].session().post(send, rollout(row, says("Done.")))
                assert caught.value.status == 422
                assert "'actions'" in caught.value.detail and message in caught.value.detail


async def test_what_a_mail_orders_is_a_change_that_no_one_asked_for():
    server = module("workplace")
    row = next(row for row in rows("workplace", "train") if "delete" not in str(row["actions"]))
    files = list(server.office(row["office"]).files)
    obeyed = [("delete_file", {"file": file}) for file in files]
    async with serving("workplace") as peers:
        answer = await peers["workplace"].post("/verify", rollout(row, *calls(*obeyed, *map(tuple, row["actions"]))))
    assert answer["reward"] == 0.0
    assert len(answer["unasked_changes"]) == len(files)
    assert answer["missing_changes"] == []


async def test_reading_changes_nothing_and_doing_the_job_twice_does():
    row = next(row for row in rows("workplace", "train") if row["actions"][0][0] == "create_event")
    reading = [
        ("today", {}),
        ("search_people", {"text": "a"}),
        ("list_tasks", {}),
        ("search_mails", {}),
        ("list_files", {}),
    ]
    once = [tuple(action) for action in row["actions"]]
    async with serving("workplace") as peers:
        for actions, reward in ((reading + once, 1.0), (once + once, 0.0)):
            assert (await peers["workplace"].post("/verify", rollout(row, *calls(*actions))))["reward"] == reward


async def test_the_calls_of_a_turn_that_was_cut_off_were_not_run_and_do_nothing():
    row = next(row for row in rows("workplace", "train") if len(row["actions"]) == 1)
    tool_calls = calls(tuple(row["actions"][0]))
    result = {"type": "function_call_output", "call_id": tool_calls[0]["call_id"], "output": "{}"}
    endings = {"whole": ("completed", tool_calls), "run": ("incomplete", [*tool_calls, result, *calls(("today", {}))])}
    endings["cut off"] = ("incomplete", tool_calls)
    async with serving("workplace") as peers:
        rewards = {}
        for name, (status, output) in endings.items():
            task = rollout(row, *output)
            task["response"]["status"] = status
            rewards[name] = (await peers["workplace"].post("/verify", task))["reward"]
    assert rewards == {"whole": 1.0, "run": 1.0, "cut off": 0.0}


async def test_each_tool_says_what_is_wrong_and_leaves_the_office_as_it_is():
    row = rows("workplace", "train")[0]
    async with serving("workplace") as peers:
        session = peers["workplace"].session()
        await session.post("/seed_session", row)
        for tool, arguments, reason in (
            ("cancel_event", {"event": "e99"}, "there is no meeting 'e99'"),
            ("share_file", {"file": "f00", "person": "Tom"}, "there is no person 'Tom'"),
            ("set_due_date", {"task": "t00", "due": "soon"}, "field 'due'"),
            ("move_file", {"file": "f00", "folder": "/etc"}, "field 'folder'"),
            ("send_mail", {"to": [], "subject": "s", "body": "b"}, "field 'to'"),
            ("close_task", {"task": "t00", "force": True}, "field 'force'"),
        ):
            with pytest.raises(ServiceError, match=reason):
                await session.post(f"/{tool}", arguments)
        answer = await session.post("/verify", rollout(row))
    assert answer["unasked_changes"] == []
    with pytest.raises(ServiceError, match="POST /seed_session first"):
        async with serving("workplace") as peers:
            await peers["workplace"].post("/today", {})


async def test_an_office_does_not_grow_without_end():
    row = rows("workplace", "train")[0]
    task = ("create_task", {"title": "x", "assignee": "p01", "due": "2027-03-20"})
    server = module("workplace")
    async with serving("workplace") as peers:
        session = peers["workplace"].session()
        await session.post("/seed_session", row)
        with pytest.raises(ServiceError, match="the office is full"):
            for _ in range(server.MAX_ROWS + 1):
                await session.post(f"/{task[0]}", task[1])
