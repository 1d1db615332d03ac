# Completes the words of qerl-bench in bash, and in zsh behind `autoload -U +X bashcompinit && bashcompinit`.
_qerl_bench() {
    local line=${COMP_LINE:0:$COMP_POINT} conf=@CONF@ words cur kept folder
    cur=${line##* }
    case ${line%"$cur"} in
    *\ *\ *) ;;
    *)
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$cur"))
        return
        ;;
    esac
    case $cur in
    [a-z]*=*) # options are files: conf/AXIS/NAME.yaml, and DIR/AXIS/NAME.yaml of --config-dir DIR
        words=
        for folder in "$conf" $(printf '%s' "$line" | sed -n 's/.*--config-dir[ =]\([^ ]*\).*/\1/p'); do
            [ -d "$folder/${cur%%=*}" ] || continue
            words="$words $(cd "$folder/${cur%%=*}" && find . -name '*.yaml' | sed 's|^\./||; s|\.yaml$||')"
        done
        kept=${cur%"${cur##*[=,]}"} # of quant=bf16,nv it is quant=bf16,
        COMPREPLY=($(compgen -W "$words" -- "${cur##*[=,]}"))
        case $COMP_WORDBREAKS in *=*) kept=${kept#*=} ;; esac # bash takes what stands behind = for a word
        COMPREPLY=("${COMPREPLY[@]/#/$kept}")
        ;;
    -*)
        COMPREPLY=($(compgen -W "@FLAGS@" -- "$cur"))
        ;;
    *)
        words=
        case $line in @COMPOSING@) words="@KEYS@" ;; esac
        COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur"))
        case ${COMPREPLY[0]} in *=) compopt -o nospace ;; *) compopt -o filenames ;; esac 2>/dev/null
        ;;
    esac
}
if [ -n "$ZSH_VERSION" ]; then # which has no compopt
    complete -o nospace -F _qerl_bench qerl-bench
else
    complete -F _qerl_bench qerl-bench
fi
