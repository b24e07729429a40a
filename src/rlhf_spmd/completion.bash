_rlhf_spmd() {
  local words
  case "$COMP_CWORD ${COMP_WORDS[1]}" in
    "1 "*) words="@programs@" ;;
@cases@
  esac
  [[ ${COMP_WORDS[COMP_CWORD-1]} == --config ]] && words=
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
  [[ ${COMPREPLY-} != *= ]] || compopt -o nospace
}
complete -o default -F _rlhf_spmd rlhf-spmd
