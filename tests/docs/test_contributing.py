"""What is set up for contributors is what exists: the workflow, the parts of .ci/run."""

import re
import subprocess

import pytest
import yaml

from common import ladder

CI = ladder.ROOT / ".ci" / "run"


def test_the_workflow_runs_a_part_of_ci_that_exists():
    workflow = yaml.safe_load((ladder.ROOT / ".github" / "workflows" / "ci.yml").read_text())
    # YAML 1.1 reads the key `on` as true.
    assert "pull_request" in workflow[True]
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run quick"]


@pytest.mark.parametrize("part", ["style", "quick", "oldest", "bench", "slow", "readme"])
def test_every_part_of_ci_that_a_page_names_is_a_function_of_the_script(part):
    script = CI.read_text()
    assert re.search(rf"^{part}\(\) {{$", script, re.MULTILINE)
    assert re.search(rf"^#   \.ci/run {part} ", script, re.MULTILINE)


def test_ci_refuses_a_part_that_does_not_exist():
    done = subprocess.run(["bash", str(CI), "everything"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: .ci/run" in done.stderr
