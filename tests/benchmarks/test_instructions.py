"""Counting instructions: what is taken for an inner loop, and what a comparison says."""

import instructions
from instructions import Loop

DISASSEMBLY = """
0000000000001000 <void inferc::tile<inferc::bf16, 2, 1>(inferc::bf16 const* const*, long)>:
    1000:	push   %rbp
    1004:	vxorps %xmm0,%xmm0,%xmm0
    1008:	vmovdqu64 (%rsi),%zmm1
    100c:	vdpbf16ps (%rdi){1to16},%zmm1,%zmm0
    1010:	vdpbf16ps %zmm2,%zmm1,%zmm3
    1014:	add    $0x40,%rsi
    1018:	cmp    %rsi,%rax
    101c:	jne    1008 <void inferc::tile<inferc::bf16, 2, 1>(inferc::bf16 const* const*, long)+0x8>
    1020:	lea    0x4(%rbx),%rbx
    1024:	cmp    %rbx,%rcx
    1028:	jne    1004 <void inferc::tile<inferc::bf16, 2, 1>(inferc::bf16 const* const*, long)+0x4>
    102c:	ret

0000000000002000 <other>:
    2000:	add    $0x1,%rax
    2004:	jmp    2000 <other>
""".splitlines()


def test_the_innermost_loop_that_multiplies_is_counted() -> None:
    (tile, code), (_, other) = instructions.functions(DISASSEMBLY).items()
    assert instructions.inner_loop(code) == Loop(instructions=6, multiply_adds=2, memory=2)
    assert instructions.inner_loop(other) is None
    assert instructions.short_name(tile) == "tile<bf16, 2, 1>"


def test_every_kind_of_product_is_known() -> None:
    for mnemonic in (
        "vfmadd231ps",
        "vdpbf16ps",
        "vpdpbusd",
        "vpmaddwd",
        "vpmaddubsw",
        "tdpbf16ps",
        "tdpbssd",
        "fmla",
        "sdot",
    ):
        assert instructions.MULTIPLY_ADD.match(mnemonic)
    assert not instructions.MULTIPLY_ADD.match("vpaddd")


def test_what_differs_is_said() -> None:
    loop = {"instructions": 6, "multiply_adds": 2, "memory": 2}
    before = {"compiler": "g++ 12", "loops": {"avx2": {"a": loop, "b": loop}}, "executed": {"x": 100, "y": 7}}
    assert instructions.differences(before, before) == []
    after = {"compiler": "g++ 12", "loops": {"avx2": {"a": loop, "b": {**loop, "instructions": 5}, "c": loop}}}
    assert instructions.differences({**after, "executed": {"x": 110, "y": 7}}, before) == [
        "avx2 b: (6, 2, 2) -> (5, 2, 2)",
        "avx2 c: None -> (6, 2, 2)",
        "avx2 x: 100 -> 110 (1.100)",
    ]
