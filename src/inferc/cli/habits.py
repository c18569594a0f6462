"""The options of other engines that people type by habit, with the message that says what to use here instead."""

from __future__ import annotations

# Options of other servers that inferc fixes when a model is compiled, by the option of `inferc compile` that replaces
# them.
AT_COMPILE = {
    "--dtype DTYPE": ("--dtype",),
    "--quantize SCHEME": ("--quantize", "--quantization", "-q"),
    "--kv-dtype int8": ("--kv-dtype", "--kv-cache-dtype"),
    "--max-model-len N": ("--max-model-len", "--context-length", "--ctx-size", "-c"),
    "--target cuda:sm_90": ("--target", "--device", "--n-gpu-layers", "--gpu-layers", "-ngl"),
    "--tp N": ("--tp", "--tp-size", "--tensor-parallel-size", "-tp"),
    "--pp N": ("--pp", "--pp-size", "--pipeline-parallel-size", "-pp"),
    "--ep N": ("--ep", "--ep-size", "--enable-expert-parallel"),
    "--expert-loads FILE": ("--expert-loads",),
    "--redundant-experts N": ("--redundant-experts",),
    "--adapter-rank N": ("--adapter-rank", "--max-lora-rank", "--enable-lora"),
    "--pass MODULE:NAME": ("--pass",),
    "--certify full": ("--certify",),
    "--allow-drift": ("--allow-drift",),
}
ARTIFACT = "give the artifact as an argument: inferc serve OUT"
KV_MEMORY = "say how large the KV cache may be: inferc serve OUT --kv-memory BYTES, for example 2GiB"
SPECULATE = (
    "what drafts tokens is --speculate ngram, ngram:shared, mtp, draft:PATH or eagle3:PATH, and the most at once"
    " --speculate-tokens N"
)
DRAFTING = ("--speculative-config", "--speculative-algorithm", "--num-speculative-tokens", "--speculative-model")
OF_LLAMA_CPP = ("--draft", "--draft-max", "--draft-n", "-md", "--model-draft", "--spec-type", "-lcd", "--lookup-cache")
LORA = "a LoRA adapter is --adapter NAME=PATH, the folder that PEFT saved it to"
NAME = "give a model's name before its artifact: inferc serve NAME=OUT"
PARSERS = "calls are read as the chat template has them, or as --tool-format says (inferc inspect OUT); leave it out"
PORTS = "there are two ports: inferc serve OUT --http-port PORT for OpenAI's interface, --grpc-port PORT for gRPC"
OF_SERVERS = {
    **{
        option: f"{option} is fixed when a model is compiled: inferc compile MODEL -o OUT {ours}"
        for ours, options in AT_COMPILE.items()
        for option in options
    },
    **dict.fromkeys(("--model", "--model-path", "-m"), ARTIFACT),
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), KV_MEMORY),
    **dict.fromkeys(("--served-model-name", "--alias"), NAME),
    **dict.fromkeys(("--allowed-origins", "--cors-allow-origins"), "say which sites: --cors-origin ORIGIN, or *"),
    **dict.fromkeys((*DRAFTING, *OF_LLAMA_CPP), SPECULATE),
    **dict.fromkeys(
        ("--lora", "--lora-scaled", "--lora-paths"), "a LoRA adapter is --adapter NAME=PATH, as PEFT saved it"
    ),
    **dict.fromkeys(("--max-loras", "--max-cpu-loras"), "255 adapters may be loaded at a time; leave it out"),
    **dict.fromkeys(("--enable-auto-tool-choice", "--jinja"), PARSERS),
    "--port": PORTS,
    "--api-key": "keys are in a file: inferc keys create FILE NAME, then inferc serve OUT --api-keys FILE",
    "--enforce-eager": "nothing runs eagerly, a model is compiled before it is served; leave --enforce-eager out",
    "--trust-remote-code": "code of a checkpoint is never run; leave --trust-remote-code out",
    "--enable-prefix-caching": "the prefix cache is on (--no-prefix-cache: off); leave --enable-prefix-caching out",
}
COMPILED = {option: message for option, message in OF_SERVERS.items() if "is fixed when a model is compiled" in message}
MODEL = "give the artifact, or the folder of a Hugging Face model, as an argument"
# Those of llama.cpp's and Ollama's commands.
OF_GENERATING = {
    **{option: message for option, message in COMPILED.items() if option != "-q"},
    **dict.fromkeys(("--model", "-m"), f"{MODEL}: inferc generate OUT --prompt TEXT"),
    **dict.fromkeys(("-p", "--prompts"), "the prompt is --prompt TEXT, or --prompt - for standard input"),
    **dict.fromkeys(("-f", "--file"), "read the prompt from standard input: inferc generate OUT --prompt - < FILE"),
    **dict.fromkeys(
        ("-n", "--n-predict", "--predict", "--max-new-tokens"), "the limit of new tokens is --max-tokens N"
    ),
    "--temp": "the temperature is --temperature T",
    **dict.fromkeys(("-j", "--json-schema", "-jf", "--json-schema-file"), "the schema is --schema FILE, or its text"),
    "--grammar-file": "the grammar is --grammar FILE",
    "--repeat-penalty": "the penalty is --repetition-penalty X",
    "--typical": "locally typical sampling is --typical-p P",
    **dict.fromkeys(
        ("--mirostat", "--mirostat-lr", "--mirostat-ent"),
        "mirostat is not built: --min-p P, --typical-p P and --xtc-probability P are there",
    ),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), "to talk with a model: inferc chat OUT"),
    "-t": "the number of threads is --threads N",
    **dict.fromkeys(("-s", "--random-seed"), "the seed is --seed N"),
    **dict.fromkeys(("-np", "--parallel"), "the most sequences of a step are --max-num-seqs N"),
    **dict.fromkeys((*DRAFTING, *OF_LLAMA_CPP), SPECULATE),
    **dict.fromkeys(("--lora", "--lora-scaled"), LORA),
    "--stop-token": "texts that end an answer are --stop TEXT",
}
_FORMS = ("-j", "--json-schema", "-jf", "--json-schema-file", "--grammar-file")
_NOT_OF_CHATS = ("-np", "--parallel", "--stop-token", "-cnv", "--conversation", "-i", "--interactive", "-f", "--file")
OF_CHATTING = {
    **{option: message for option, message in OF_GENERATING.items() if option not in _NOT_OF_CHATS + _FORMS},
    **dict.fromkeys(("--model", "-m"), f"{MODEL}: inferc chat OUT"),
    **dict.fromkeys(("-sys", "--system-prompt", "-p", "--prompts"), "the system message is --system TEXT"),
}
