# Tab completion of `tpformer` in bash: commands, their options and files. `source` this file in ~/.bashrc.
_tpformer() {
    local word=${COMP_WORDS[COMP_CWORD]} words
    if ((COMP_CWORD == 1)); then
        words=$(tpformer --help | sed -n 's/^  \([a-z-]*\) .*/\1/p')
    elif [[ ${COMP_WORDS[1]} == data && COMP_CWORD -eq 2 ]]; then
        words="build stdlib"
    elif [[ $word == -* ]]; then
        local command=${COMP_WORDS[1]}
        [[ $command == data ]] && command="data ${COMP_WORDS[2]}"
        words=$(tpformer $command --help | grep -o -e '--[a-z][a-z0-9.-]*' | sort -u)
    fi
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
complete -o default -F _tpformer tpformer
