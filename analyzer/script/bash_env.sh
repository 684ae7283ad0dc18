# Read by every bash that a launch script starts (BASH_ENV). The line above sets __info_folder.
#
# A DEBUG trap runs before each command. It puts the stand-ins first on PATH again if the script changed PATH, and defines a function
# for a launcher that is called by its path: `/opt/conda/bin/torchrun` may name a function in bash. That is not needed with the library
# preload/exec.c, which INFO_SCRIPT_PRELOAD names. The trap keeps $?, $_ and
# PIPESTATUS, and prints nothing with `set -x`. It does not use `local -`, which would turn `set -e` on in command substitutions.

if [ -n "${INFO_SCRIPT_BASH_ENV-}" ] && [ -r "$INFO_SCRIPT_BASH_ENV" ]; then
    . "$INFO_SCRIPT_BASH_ENV"
fi
export INFO_SCRIPT_FOLDER=$__info_folder
export INFO_SCRIPT_MAIN=${INFO_SCRIPT_MAIN-$$} # the shell of the script itself

if [ -z "${INFO_SCRIPT_RUN_ALL-}" ]; then
    # The processes that a script wants to end do not exist here, which is no reason for `set -e` to end the script.
    kill() {
        case " $* " in
            *' -0 '* | *' -s 0 '* | *' -n 0 '* | *' -l'* | *' -L'*) builtin kill "$@" || return ;;
            *) builtin kill "$@" 2>/dev/null || : ;;
        esac
    }
    # Limits that need rights which the run does not have are left as they are.
    ulimit() {
        builtin ulimit "$@" 2>/dev/null || printf 'get-training-info: not set: ulimit %s\n' "$*" >&2
    }
fi

if [ -n "${INFO_SCRIPT_ELSEWHERE-}" ]; then
    # in a container or on another machine, whose folders are not here
    cd() {
        builtin cd "$@" 2>/dev/null || printf 'get-training-info: not here: cd %s\n' "$*" >&2
    }
fi

# The first word of the command $1, in __info_word, and the rest, in __info_rest. Fails if quotes make this difficult.
__info_split() {
    local rest=$1 word='' chunk double single opened closed count=0
    rest=${rest#"${rest%%[![:space:]]*}"}
    while [[ -n $rest ]]; do
        chunk=${rest%%[[:space:]]*}
        word+=$chunk
        rest=${rest:${#chunk}}
        case $word in *'$('* | *'`'* | *'<('* | *'>('*) return 1 ;; esac
        double=${word//[!\"]/} single=${word//[!\']/} opened=${word//[!\{]/} closed=${word//[!\}]/}
        if ((${#double} % 2 == 0 && ${#single} % 2 == 0 && ${#opened} == ${#closed})); then
            __info_word=$word
            __info_rest=$rest
            return 0
        fi
        count=$((count + 1))
        if [[ $count -gt 100 ]]; then
            return 1
        fi
        word+=${rest:0:1}
        rest=${rest:1}
    done
    return 1
}

# Notes that a loop of the script sleeps. Sets __info_leave if it has slept so often that it waits for something that does not come.
__info_sleeps() {
    local records=("$__info_folder"/records/*)
    if [[ $__info_slept_at == "$1 ${#records[@]}" ]]; then
        __info_slept=$((__info_slept + 1))
    else
        __info_slept=1 __info_slept_at="$1 ${#records[@]}"
    fi
    if [[ $__info_slept -gt 20 ]]; then
        __info_slept=0 __info_leave=yes
        printf '%s\n' "$1" >>"$__info_folder/waits" || true
    fi
}

# Before each command: $1 is $_, $2 the file and $3 the line of the command, $4 the status of the command before it.
__info_before() {
    __info_last=$1
    local IFS=$' \t\n' text=$BASH_COMMAND bin=$__info_folder/bin depth=${#FUNCNAME[@]} word
    if [[ $3 == 1 && $__info_line != 1 && $text == "$__info_text" ]]; then
        # inside another trap, where BASH_COMMAND is the command before the trap, and the first line has the number 1
        if [[ $4 != 0 && $text != exit && $text != 'exit '* ]]; then
            __info_write "$__info_source" "$__info_line" "$4" "$text"
        fi
        return 0
    fi
    if [[ $4 != 0 && $depth -le $__info_depth ]]; then
        __info_bad=("$__info_source" "$__info_line" "$4" "$__info_text")
    fi
    if [[ $depth -le $__info_depth || $text != "$__info_text" ]]; then
        # not at the entry of the function that this command calls
        __info_source=$2 __info_line=$3 __info_text=$text __info_depth=$depth
    fi
    if [[ ${PATH-} != "$bin":* || ${BASH_ENV-} != "$__info_folder/bash_env" ]]; then
        __info_restore "$bin"
    fi
    if [[ -n $2 && $2 != "$BASH_ENV" && ${FUNCNAME[1]-} != */* && ${FUNCNAME[1]-} != exec ]]; then
        INFO_SCRIPT_LINE="$3 $2"
    fi
    word=${text%%[[:space:]]*}
    case $word in
        sleep) if [[ -z ${INFO_SCRIPT_RUN_ALL-} ]]; then __info_sleeps "$3 $2"; fi ;;
        exit)
            if [[ ${#__info_bad[@]} -eq 4 ]]; then
                __info_write "${__info_bad[@]}"
            fi
            __info_write "$2" "$3" '' "$text"
            return 0
            ;;
        source | .)
            __info_environment "$text"
            return 0
            ;;
        exec | command | builtin) ;;
        '(('* | '[' | '[[') return 0 ;;
        [A-Za-z_]*=*)
            # an assignment of one word, of an array, or of a text in double quotes, and nothing else
            if [[ $word == "$text" || $word == *'=('* ]]; then
                return 0
            elif [[ $word == *'="'* && $text == *'"' ]]; then
                text=${text#*=\"}
                if [[ ${text%\"} != *\"* ]]; then
                    return 0
                fi
                text=$BASH_COMMAND
            fi
            ;;
        *[!A-Za-z0-9_.+-]*) ;;
        *) return 0 ;;
    esac
    if [[ -z ${INFO_SCRIPT_PRELOAD-} ]]; then
        __info_cover "$text" "$bin"
    fi
    return 0
}

# Puts the stand-ins in $1 first on PATH, and BASH_ENV back. The script's own BASH_ENV is kept.
__info_restore() {
    local places=:${PATH-/usr/local/bin:/usr/bin:/bin}:
    places=${places//":$1:"/:}
    places=${places#:}
    export PATH=$1:${places%:}
    if [[ ${BASH_ENV-} != "$__info_folder/bash_env" ]]; then
        export INFO_SCRIPT_BASH_ENV=${BASH_ENV-}
        export BASH_ENV=$__info_folder/bash_env
    fi
}

# Expands the word $1 into the array `words`, without file names, and with empty texts for variables that are not set.
__info_expand() {
    local options=$- status=0
    case $options in *u*) set +u ;; esac
    case $options in *f*) ;; *) set -f ;; esac
    eval "set -- $1" || status=1 # not "words=($1)", which is a syntax error for the command `[`
    words=("$@")
    case $options in *f*) ;; *) set +f ;; esac
    case $options in *u*) set -u ;; esac
    return $status
}

# Defines a function for the program of the command $1 if it has a stand-in in $2 and PATH would not find that.
__info_cover() {
    local rest=$1 bin=$2 name first path_is_set='' builtin_word='' by_stand_in
    local -a words=()
    while [[ ${#words[@]} -eq 0 ]]; do
        __info_split "$rest" || return 0
        rest=$__info_rest
        name=${__info_word%%=*}
        if [[ -z $builtin_word && $__info_word == [A-Za-z_]*=* && ${name%+} != *[!A-Za-z0-9_]* ]]; then
            if [[ $name == PATH ]]; then
                path_is_set=yes
            fi
            continue
        fi
        case $__info_word in
            *[=\?\<\>\&\;\|\(\)]* | *++*) return 0 ;;
        esac
        __info_expand "$__info_word" || return 0
        while [[ ${words[0]-} == exec || ${words[0]-} == command || ${words[0]-} == builtin ]]; do
            builtin_word=${words[0]}
            words=("${words[@]:1}")
        done
    done
    first=${words[0]}
    case $first in
        "$bin"/* | *[!A-Za-z0-9_./+@%:,-]*) return 0 ;;
        */*) ;;
        *) if [[ -z $path_is_set ]]; then return 0; fi ;;
    esac
    name=${first##*/}
    if [[ -n $name && -e $bin/$name ]]; then
        by_stand_in="$bin/$name"
    elif [[ $first == */*.sh && -f $first ]]; then
        by_stand_in="$bin/sh $first"
    else
        return 0
    fi
    case $builtin_word in
        exec | command)
            eval "$builtin_word() { unset -f $builtin_word; export INFO_SCRIPT_REAL=$first; shift; builtin $builtin_word $by_stand_in \"\$@\"; }"
            ;;
        *)
            eval "function $first { INFO_SCRIPT_REAL=$first $by_stand_in \"\$@\"; }"
            ;;
    esac
}

# Defines a function for the command $1, such as `source /usr/local/Ascend/nnal/atb/set_env.sh`, that prints a line and succeeds, if
# the file belongs to software of the machine of the training that is not installed here. Relative paths and those of users are not such.
__info_environment() {
    local rest=${1#*[[:space:]]} name=${1%%[[:space:]]*}
    local -a words=()
    __info_split "$rest" || return 0
    case $__info_word in
        *[=\?\*\<\>\&\;\|\(\)]*) return 0 ;;
    esac
    __info_expand "$__info_word" || return 0
    case ${words[0]-} in
        /usr/* | /opt/* | /etc/*) ;;
        *) return 0 ;;
    esac
    if [[ ! -e ${words[0]} ]]; then
        eval "function $name { unset -f $name; printf 'get-training-info: not here: $name %s\n' \"\$1\" >&2; }"
    fi
}

# Appends one line about a command that failed, or that ends the script.
__info_write() {
    printf '%s\t%s\t%s\t%s\t%s\n' "$BASHPID" "$3" "$2" "$1" "${4//[$'\t\n']/ }" >>"$__info_folder/failures" || true
}

# After a command that failed: $1 is $_, $2 the status, $3 the file and $4 the line of the command $5.
__info_failed() {
    __info_last_argument=$1
    if [[ $3 != "$BASH_ENV" && ${FUNCNAME[1]-} != */* ]]; then
        __info_write "$3" "$4" "$2" "$5"
    fi
    return 0
}

# At the end with the status $1 and the last command $2, which may have ended the shell by itself, such as `: ${NAME:?}`.
__info_end() {
    if [[ $1 != 0 && $$ == "$INFO_SCRIPT_MAIN" ]]; then
        case "$-" in *[eu]*) : >"$__info_folder/ended_by_option" || true ;; esac
    fi
    case $2 in
        exit | 'exit '* | 'trap '*__info_before*) return 0 ;;
    esac
    if [[ $1 != 0 ]]; then
        __info_write "${INFO_SCRIPT_LINE#* }" "${INFO_SCRIPT_LINE%% *}" "$1" "$2"
    fi
}

__info_leave='' __info_slept=0 __info_slept_at=''
__info_bad=() __info_text='' __info_source='' __info_line=1 __info_depth=1
export INFO_SCRIPT_LINE=${INFO_SCRIPT_LINE-}
if ((BASH_VERSINFO[0] > 4 || (BASH_VERSINFO[0] == 4 && BASH_VERSINFO[1] >= 4))); then
    set -o errtrace -o functrace
    trap '{ __info_failed "$_" "$?" "${BASH_SOURCE[0]-}" "$LINENO" "$BASH_COMMAND" || :; : "$__info_last_argument"; } 2>/dev/null' ERR
    trap '{ __info_status=$?; trap - DEBUG ERR; __info_end "$__info_status" "$BASH_COMMAND" || :; } 2>/dev/null' EXIT
    trap '{ __info_before "$_" "${BASH_SOURCE[0]-}" "$LINENO" "$?" || :; if [[ -n $__info_leave ]]; then __info_leave=; break; fi; : "$__info_last"; } 2>/dev/null' DEBUG
fi
