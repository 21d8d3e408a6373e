"""Conditions of a shell script: evaluated if the script sets their variables, else refused if an option depends on
them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.interop.importing import import_plan
from meshwright.interop.shell import read_command

MEGATRON_LINE = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size $TP --micro-batch-size 1 "
    "--global-batch-size 8 --seq-length 128 ${EXTRA[@]}"
)
CONDITIONS = [
    ('if [[ "$D" == "fp8" ]]; then\n  EXTRA+=(--x)\nfi', False),
    ('if [ "$D" = bf16 ]; then EXTRA+=(--x); else EXTRA+=(--y); fi', True),
    ("if [ $N -gt 4 ]\nthen\n  if true; then\n    EXTRA+=(--x)\n  fi\nelse\n  EXTRA+=(--y)\nfi", False),
    ('if [ -z "$D" ]; then A=1; elif [[ $D == bf* && $N -le 2 ]]; then EXTRA+=(--x); else A=2; fi', True),
    ("if (( N * 2 >= 4 )) && ! [ $D = fp8 ]; then EXTRA+=(--x); fi", True),
    ("[ $N -ne 2 ] && EXTRA+=(--x)", False),
    ("[ $N -eq 1 ] && { A=1; EXTRA+=(--x); }", False),
    ('[[ -n "$D" ]] || EXTRA+=(--x)', False),
    ("case $D in\n  fp8|fp16) EXTRA+=(--y) ;;\n  bf16)\n    EXTRA+=(--x)\n    ;;\n  *) EXTRA+=(--y) ;;\nesac", True),
    ("case $N in 1) EXTRA+=(--x);; *) EXTRA+=(--y);; esac", False),
]


@pytest.mark.parametrize(("condition", "runs"), CONDITIONS)
def test_a_condition_of_known_variables_is_evaluated(condition: str, runs: bool) -> None:
    command = read_command(f"D=bf16\nN=2\nTP=2\n{condition}\n{MEGATRON_LINE}\n")
    assert ("--x" in command.arguments) == runs and not command.conditional
    assert "--y" not in command.arguments or not runs


def test_an_option_that_depends_on_a_condition_without_a_value_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"TP=2\nEXTRA=()\nif [[ $D == fp8 ]]; then\n  EXTRA+=(--fp8-format hybrid)\nfi\n{MEGATRON_LINE}\n"
    )
    with pytest.raises(InputError, match=r"run.sh:3: --fp8-format depends on \[\[ \$D == fp8 .*: set D in the script"):
        import_plan(script)
    script.write_text(f"EXTRA=()\nif test -f x || [ -f y ]; then TP=2; else TP=4; fi\n{MEGATRON_LINE}\n")
    with pytest.raises(InputError, match=r"run.sh:2: --tensor-model-parallel-size depends on .*: remove the condition"):
        import_plan(script)
    script.write_text(f"TP=2\nEXTRA=()\ncase $1 in\n  a) TP=4 ;;\nesac\n{MEGATRON_LINE}\n")
    with pytest.raises(InputError, match=r"run.sh:4: --tensor-model-parallel-size depends on"):
        import_plan(script)
    script.write_text(
        "cd there && TP=2\nEXTRA=()\nif [ ! -d x ]; then echo no; exit 1; fi\n[ -z $A ] && EXTRA+=(--save c)\n"
        f"{MEGATRON_LINE} 2>&1 "
    )
    with pytest.raises(InputError, match=r"run.sh:1: --tensor-model-parallel-size depends on cd there"):
        import_plan(script)
    script.write_text(script.read_text().replace("&& TP", "\nTP").replace("2>&1", "> log.txt 2>&1 | tee x"))
    found = import_plan(script)
    assert found.plan.name == "dp4.tp2.mb1" and found.plan.world == 8
    assert f"{script}:5: --save depends on [ -z $A ], which is not evaluated: set A in the script, or remove the " in (
        "\n".join(found.not_carried)
    )
