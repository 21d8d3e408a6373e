#!/bin/sh
# Makes the virtual environment .venv for the targets of the Makefile: set_up.sh PYTHON LOCK_FILE TORCH_VERSION STAMP.
# Torch's own small dependencies are in the lock file, so that installing torch after it changes none of them; --no-deps in the
# first step keeps every other package from pulling a torch of its choice. The stamp is written last: without it everything starts
# again. The lines are in Chinese if the locale is.
set -e
python=$1 lock=$2 torch=$3 stamp=$4
pip=".venv/bin/python -m pip --disable-pip-version-check -qq"

# Prints the first text, or the second one in a Chinese locale.
say() {
  case "${LC_ALL:-${LC_MESSAGES:-${LANG:-}}}" in
    zh*) echo "$2" >&2 ;;
    *) echo "$1" >&2 ;;
  esac
}

# Ctrl-C reaches make and pip too. Pip's lines are dropped. Make ends without a line of its own if this script ends with 0.
stop() {
  trap '' INT
  say "set-up stopped; the same command starts it again" "安装已中断；再次运行同一命令即可重新开始"
  exit 0
}
trap stop INT

step() {
  "$@" 2>.venv/set-up.log || { code=$?; cat .venv/set-up.log >&2; exit $code; }
}

packages=$(grep -c == "$lock")
say "set-up, once: virtual environment in .venv" "安装（仅一次）：在 .venv 中创建虚拟环境"
"$python" -m venv --clear .venv
say "set-up, once: $packages packages of $lock (minutes without output)" "安装（仅一次）：$lock 的 $packages 个软件包（几分钟内没有输出）"
step $pip install --require-hashes --no-deps -r "$lock"
say "set-up, once: torch $torch (minutes without output)" "安装（仅一次）：torch $torch（几分钟内没有输出）"
step $pip install "torch==$torch"
step $pip install --no-deps --no-build-isolation -e .
step $pip check
touch "$stamp"
