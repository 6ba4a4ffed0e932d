# Completion of numapin for fish. Printed by: numapin completion fish
#
# To load it in every new shell, write it once to a file:
#     numapin completion fish > ~/.config/fish/completions/numapin.fish
# or add this line to ~/.config/fish/config.fish:
#     numapin completion fish | source

function __numapin_complete
    set -l typed (commandline -opc)
    set -l program (string replace -r '^~' -- $HOME $typed[1])
    $program _complete fish $typed[2..] (commandline -ct) 2>/dev/null | while read -l -d \t kind value description
        switch $kind
            case word
                printf '%s\t%s\n' $value $description
            case file
                __numapin_paths __fish_complete_path $value
            case dir
                __numapin_paths __fish_complete_directories $value
            case command
                set -l words $typed[(math $value + 1)..] (commandline -ct)
                complete --do-complete (string join ' ' -- (string escape -- $words[1..-2]) $words[-1])
        end
    end
end

# Complete the path at the cursor; what precedes it in the word, such as --output=, is put in front of each result.
function __numapin_paths
    set -l path (string replace -- "$argv[2]" '' (commandline -ct))
    for found in ($argv[1] $path)
        printf '%s%s\n' $argv[2] $found
    end
end

complete --command numapin --no-files --arguments '(__numapin_complete)'
