# Completion of numapin for bash. Printed by: numapin completion bash
#
# To load it in every new shell, add this line to ~/.bashrc:
#     eval "$(numapin completion bash)"
# or, with the package bash-completion, write it once to a file that is read at the first key press:
#     mkdir -p ~/.local/share/bash-completion/completions
#     numapin completion bash > ~/.local/share/bash-completion/completions/numapin

_numapin_completion() {
    local kind value program=${1/#\~/$HOME}
    COMPREPLY=()
    while IFS=$'\t' read -r kind value; do
        case $kind in
        word) COMPREPLY+=("$value") ;;
        file) mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$value") ;;
        dir)
            ((${#COMPREPLY[@]})) || compopt -o filenames
            mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -d -- "$value")
            ;;
        default) compopt -o default ;; # readline's own completion of file names, if there is no word
        command) _numapin_other_command "$value" ;;
        esac
    done < <("$program" _complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" "${COMP_WORDS[@]:0:COMP_CWORD+1}" \
        2>/dev/null)
}

# Complete the command line that begins at this word, with its own completion if the package bash-completion is there.
_numapin_other_command() {
    if declare -F _command_offset >/dev/null; then
        _command_offset "$1"
    elif ((COMP_CWORD == $1)); then
        mapfile -t COMPREPLY < <(compgen -c -- "${COMP_WORDS[COMP_CWORD]}")
    else
        compopt -o default
    fi
}

complete -o nosort -F _numapin_completion numapin 2>/dev/null || complete -F _numapin_completion numapin
