"""What people say for what tools' authors write: "forget", "strike" and "drop" for delete. Words of one line count as a
shared word when a request is compared with a tool. General English for what tools do to files, records, code, pages
and time; nothing in it is about one server.
"""

from __future__ import annotations

from heedful.mcp.catalogue.bm25 import words

_LINES = """
delete remove erase forget drop strike wipe discard clear purge destroy cancel rid
create make new build add introduce set up establish
write save store put note record jot remember keep down
add append also too insert more additional extend attach
read open show view see print display content contents load tell look say pull
list which enumerate exist available overview all there any
search find locate look anybody anyone anything somewhere where hunt
edit replace change modify update alter correct substitute line patch swap
move rename shift relocate transfer call
copy duplicate clone
directory folder folders subfolder path paths dir
file files document disk
tree hierarchy nested recursive whole structure
diff compare difference differ edited changed modified versus changes
unstaged working uncommitted
staged stage index
reset unstage undo revert
commit commits committed committer message
branch branches branching fork
checkout switch over
status uncommitted modified untracked clean dirty pending
log history newest recent latest past
repository repo git code
convert translate mean means into corresponding
time clock hour late early now date today
timezone zone city country local abroad
fetch url page website web site http https link summarise summarize article online internet
database db sqlite sql table tables
query select rows row records count average
insert update delete set rows row records price
describe schema structure columns column types fields
insight memo finding business report
graph memory memories remember know stored knowledge recall learned
entity entities person people somebody company thing named called entry node nodes
relation relations relationship link connection between connect
observation observations fact remark detail statement
sum add plus total addition much calculate number numbers together
image picture photo logo icon
media audio sound video image photo picture base64
compress gzip archive zip gz
environment env variables variable
toggle turn switch start stop on off enable disable
simulate simulated pretend fake dummy demo
long lengthy slow running progress
research study investigate topic
think thoughts thinking reason step steps problem plan
size large big space sizes largest bytes
info metadata information permissions owner created modified accessed
allowed permitted may access touch reach
multiple several together both many simultaneously
weather temperature forecast rain sunny cold warm
echo repeat back exactly
email mail send message inbox
calendar meeting appointment event schedule
"""
_SYNONYMS: dict[str, tuple[str, ...]] = {}
for _number, _line in enumerate(_LINES.split("\n")):
    for _word in words(_line):
        _SYNONYMS[_word] = (*_SYNONYMS.get(_word, ()), f"#{_number}")


def with_synonyms(stems: list[str]) -> list[str]:
    """The stems, and one mark for each line of the thesaurus that any of them is in."""
    return [*stems, *(mark for each in stems for mark in _SYNONYMS.get(each, ()))]
