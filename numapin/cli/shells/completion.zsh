#compdef numapin
# Completion of numapin for zsh. Printed by: numapin completion zsh
#
# To load it in every new shell, add this line to ~/.zshrc, below compinit:
#     eval "$(numapin completion zsh)"
# or write it once to a file named _numapin in a folder of $fpath:
#     numapin completion zsh > "${fpath[1]}/_numapin"

_numapin() {
    local -a described plain
    local kind value description command_at=0
    local program=${(Q)words[1]/#\~/$HOME}
    while IFS=$'\t' read -r kind value description; do
        case $kind in
        word)
            if [[ -n $description ]]; then
                described+=("${value//:/\\:}:$description")
            else
                plain+=("$value")
            fi
            ;;
        file | dir)
            [[ -n $value ]] && compset -P "${(b)value}"
            if [[ $kind == dir ]]; then _files -/; else _files; fi
            ;;
        command) command_at=$value ;;
        esac
    done < <("$program" _complete zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)

    if ((command_at)); then
        shift $command_at words
        ((CURRENT -= command_at))
        _normal
        return
    fi
    (($#described)) && _describe -V numapin described
    (($#plain)) && compadd -V numapin -a plain
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _numapin "$@" # a file in $fpath is run at the first key press
else
    compdef _numapin numapin
fi
