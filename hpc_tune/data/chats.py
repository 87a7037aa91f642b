"""Examples -> text, with the spans of characters that are learned.

The chat template renders a chat as one text; ``answers.py`` finds the assistant's words in it.
Special tokens that users typed into a message stay text. Text that no template writes (plain text,
prompts and answers of a base model) is tokenized as by a stock tokenizer, special tokens included.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jinja2 import TemplateError, TemplateSyntaxError

from hpc_tune.data.answers import (
    ESCAPE_IN_ASCII_JSON,
    SENTINEL,
    AnswerFinder,
    RenderedChat,
    RenderFunction,
    Span,
    SpecialTokenEscapes,
    find_marked_blocks,
    group_by_answer,
)
from hpc_tune.data.counts import Counters
from hpc_tune.data.fields import serialize_arguments
from hpc_tune.data.records import Chat, Completion
from hpc_tune.data.tokenizer import ChatTemplates, FastTokenizer, tokenizer_name
from hpc_tune.errors import DataError, first_line

LossOn = Literal["answers", "all"]
# The learned spans of an answer; () if the template marks only other text, None if unsure.
AnswerSpans = tuple[Span, ...] | None
# What a template may raise if it cannot render the messages.
TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError,
    NameError, RuntimeError, SyntaxError,
)  # fmt: skip
_MAX_REASON_CHARS = 120
# Existing prepared files hold this text as a key of counts; it means special tokens.
_ASCII_JSON_REASON = "the chat template writes a typed control token as JSON in ASCII"
_END_OF_REASONING = "</think>"
_KNOWN_ROLES = {"system", "user", "assistant"}
# What other data sets call the assistant, in lower case.
_ASSISTANT_NAMES = ("assistant", "gpt", "chatgpt", "model", "bot", "chatbot", "ai", "agent")
# Trial chats that show which special tokens a template writes around turns; the first it accepts.
_TRIAL_TURNS = (
    ("system", "user", "assistant", "tool", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
)


@dataclass(frozen=True)
class RenderedText:
    """Text for the tokenizer; ``spans`` (characters) are learned, None means all.

    ``weights``: the loss weight of each span, or of the whole text; empty if all are 1.
    ``is_plain``: not written by a chat template. ``bos`` and ``eos``: add these tokens around it.
    ``split``: split a text that is longer than a row into several documents.
    """

    text: str
    spans: list[Span] | None
    is_plain: bool = False
    bos: bool = False
    eos: bool = False
    split: bool = False
    weights: tuple[float, ...] = ()


class Renderer:
    """Renders chats and completions with a tokenizer's chat template; counts what it drops."""

    def __init__(self, tokenizer: FastTokenizer, loss_on: LossOn, counters: Counters) -> None:
        """Take a tokenizer with its template; ``escapes`` hides typed tokens in rendered text."""
        self._tokenizer, self._loss_on, self._counters = tokenizer, loss_on, counters
        self._templates = ChatTemplates(tokenizer.chat_template)
        special = list_special_tokens(tokenizer)
        self.escapes = SpecialTokenEscapes(special, self._turn_tokens(special), counters)
        self._answer_finder = AnswerFinder(special)
        self._written_roles: set[str] = set()  # roles that the template is known to write
        self._shows_tools = False

    def render(self, example: Chat | Completion) -> RenderedText | str:
        """Return the text and its spans, or the reason to drop the example.

        Raises:
            DataError: for messages if the tokenizer has no chat template, or one that cannot be
                parsed.
        """
        if isinstance(example, Completion):
            if not self._templates:
                return self._render_plain(example)
            example = example.as_chat()
        if not self._templates:
            raise DataError(
                f"the data are chats (messages), but the tokenizer "
                f"{tokenizer_name(self._tokenizer)} has"
                " no chat template; set data.chat_template to a Jinja file, or use the instruct"
                " model's"
            )
        original = example = replace(example, messages=self._fill_null_content(example.messages))
        extras = sorted({message["role"] for message in example.messages} - _KNOWN_ROLES)
        note = f"; roles beside system, user and assistant: {', '.join(extras)}" if extras else ""
        try:
            example, full_text = self._render_chat(example)
        except TemplateSyntaxError as error:  # the model's own; a file's was parsed before
            source = f"the chat template of {tokenizer_name(self._tokenizer)}, line {error.lineno}"
            raise DataError(
                f"{source}, cannot be read: {first_line(error).rstrip('.')}; copy the model again, "
                "or set data.chat_template to a Jinja file"
            ) from None
        except TEMPLATE_ERRORS as error:
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            reason = f"{kind}{str(error)[:_MAX_REASON_CHARS]}"
            return f"the chat template refused the messages ({reason}){note}"
        if ESCAPE_IN_ASCII_JSON in full_text and example != original:
            return _ASCII_JSON_REASON
        self._count_omitted_content(example, full_text)
        if self._loss_on == "all" and not (example.unlearned or example.weights):
            return RenderedText(full_text, None, weights=_drop_weights_if_all_one([example.weight]))
        answer_indices = [n for n, m in enumerate(example.messages) if m["role"] == "assistant"]
        if not answer_indices:
            return f"no answer of the assistant{note}"
        answer_spans = self._find_learned_spans(example, answer_indices, full_text)
        if self._loss_on == "all":
            return self._select_all_except_unlearned(
                example, answer_indices, answer_spans, full_text
            )
        for role in (m["role"] for m in example.messages if m["role"] != "assistant"):
            if role.strip().lower() in _ASSISTANT_NAMES:
                self._counters.count_role("other_answers", role)
        return self._select_answers(example, answer_indices, answer_spans, full_text)

    def prompt(self, chat: Chat) -> RenderedText:
        """Return the prompt for the assistant's next answer in a chat, as training renders it.

        Without a chat template, the chat must be one prompt, with or without a system prompt.

        Raises:
            DataError: if the chat is more than that, or the template refuses or misrenders it.
        """
        if not self._templates:
            if chat.tools or [m["role"] for m in chat.messages] not in (
                ["user"],
                ["system", "user"],
            ):
                raise DataError(
                    f"the tokenizer {tokenizer_name(self._tokenizer)} has no chat template: it "
                    "takes a prompt, with or without a system prompt, and neither tools nor "
                    "further turns"
                )
            texts = [str(message.get("content") or "") for message in chat.messages]
            return RenderedText("\n\n".join(texts), None, is_plain=True, bos=True)
        original = chat = replace(chat, messages=self._fill_null_content(chat.messages))
        try:
            chat, text = self._render_chat(chat, include_generation_prompt=True)
        except TEMPLATE_ERRORS as error:
            raise DataError(
                f"the chat template refuses the messages: {first_line(error)[:_MAX_REASON_CHARS]}"
            ) from None
        if ESCAPE_IN_ASCII_JSON in text and chat != original:
            raise DataError(_ASCII_JSON_REASON)
        if (full_text := self._make_render_function(chat)(chat.messages)) is not None:
            self._count_omitted_content(chat, full_text)
        return RenderedText(text, None)

    def _select_answers(
        self,
        example: Chat,
        answer_indices: list[int],
        answer_spans: list[AnswerSpans],
        full_text: str,
    ) -> RenderedText | str:
        """Select the answers of a chat as learned text; count those that are not learned."""
        learned_spans: list[Span] = []
        weights: list[float] = []
        num_empty = num_unmarked = 0
        for number, spans in zip(answer_indices, answer_spans, strict=True):
            answer = "".join(full_text[slice(*span)] for span in spans or ())
            if number in example.unlearned:
                self._counters.marked_answers += 1
                continue
            if spans == ():
                num_unmarked += 1
                continue
            message = example.messages[number]
            self._counters.lost_reasoning += _read_reasoning(message) not in answer
            self._counters.written_reasoning += _is_reasoning_present(message, answer)
            names = Counter(_called_tool_names(message))
            searched_text = answer if spans else full_text
            lost_calls = any(searched_text.count(name) < names[name] for name in names)
            self._counters.lost_calls += lost_calls
            if _is_empty_answer(message, answer) and (spans or lost_calls or not names):
                num_empty += 1
            elif spans is None:
                self._counters.unclear_answers += 1
            else:
                *others, last = spans
                if not self._answer_finder.has_end_token(full_text, last, message):
                    full_text, last = self._include_end_token(example, number, full_text, last)
                learned_spans += [*others, last]
                weights += [example.weights.get(number, example.weight)] * len(spans)
        self._counters.empty_answers += num_empty
        self._counters.unmarked_answers += num_unmarked
        if learned_spans:
            return RenderedText(full_text, learned_spans, weights=_drop_weights_if_all_one(weights))
        if num_empty == len(answer_indices):
            return "empty answer"
        if num_empty + len(example.unlearned) == len(answer_indices):
            return "no answer that is to be learned"
        if num_unmarked:
            return "the chat template marks no answer in it ({% generation %})"
        return "the chat template does not show where the answer begins"

    def _include_end_token(
        self, chat: Chat, answer_index: int, full_text: str, span: Span
    ) -> tuple[str, Span]:
        """Return the text, and an answer without an end token extended by the token after it.

        The token is appended to the text if the answer is the last message. If the template marks
        what is learned, text and answer stay as they are.
        """
        is_marked = self._templates.choose(chat.tools is not None)[1] is not None
        extension = None
        if not is_marked:
            rendering = self._make_rendered_chat(chat, full_text)
            extension = self._answer_finder.extend_by_next_turn_token(rendering, answer_index, span)
        self._counters.unended_answers += extension is None
        self._counters.ended_by_next += extension is not None
        return extension or (full_text, span)

    def _make_rendered_chat(self, chat: Chat, full_text: str) -> RenderedChat:
        return RenderedChat(
            self._make_render_function(chat), chat.messages, full_text, self._answer_finder.special
        )

    def _make_render_function(self, chat: Chat) -> RenderFunction:
        def render(
            messages: Sequence[dict[str, Any]], include_generation_prompt: bool = False
        ) -> str | None:
            try:
                return self._apply_template(messages, include_generation_prompt, chat.tools)
            except TEMPLATE_ERRORS:
                return None

        return render

    def _render_chat(self, chat: Chat, include_generation_prompt: bool = False) -> tuple[Chat, str]:
        """Return a chat as the template accepts it, with typed special tokens hidden, and its text.

        Raises one of TEMPLATE_ERRORS if the template refuses it. Some templates (DeepSeek-V3) want
        the arguments of calls as a JSON string, as OpenAI has them.
        """
        messages = self.escapes.hide_in_messages(chat.messages)
        chat = replace(chat, messages=messages, tools=self.escapes.hide_special_tokens(chat.tools))
        try:
            return chat, self._apply_template(chat.messages, include_generation_prompt, chat.tools)
        except TEMPLATE_ERRORS:
            as_text = replace(chat, messages=serialize_arguments(chat.messages))
            text = self._make_render_function(chat)(as_text.messages, include_generation_prompt)
            if as_text != chat and text is not None:
                return as_text, text
            raise

    def _find_learned_spans(
        self, chat: Chat, answer_indices: list[int], full_text: str
    ) -> list[AnswerSpans]:
        _, template = self._templates.choose(chat.tools is not None)
        blocks = None
        if template is not None:
            blocks = find_marked_blocks(
                self._apply_template(chat.messages, False, chat.tools, template), full_text
            )
        if blocks is not None and len(blocks) == len(answer_indices):
            return [(block,) for block in blocks]
        rendered_chat = self._make_rendered_chat(chat, full_text)
        spans = self._answer_finder.find(rendered_chat, answer_indices)
        if blocks is not None:
            return [*group_by_answer(blocks, spans)]
        return [None if span is None else (span,) for span in spans]

    def _fill_null_content(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with empty text in place of null, which templates would write as None.

        Null content beside tool calls stays: templates check whether there is also text.
        """
        filled_messages = []
        for message in messages:
            if (
                "content" in message
                and message["content"] is None
                and not _called_tool_names(message)
            ):
                self._counters.null_contents += message["role"] != "assistant"
                message = {**message, "content": ""}
            filled_messages.append(message)
        return filled_messages

    def _count_omitted_content(self, chat: Chat, full_text: str) -> None:
        """Count the messages, but for the assistant's, and tools that the template does not write.

        A text that is not found verbatim may have been written in another form: the chat is
        rendered again with a sentinel in its place, which is searched for.
        """
        suspects = {
            number: f"{SENTINEL}{number}x"
            for number, message in enumerate(chat.messages)
            if message["role"] != "assistant"
            and (text := (message.get("content") or "").strip())
            and not (message["role"] in self._written_roles and text in full_text)
        }
        messages = [
            {**message, "content": suspects[number]} if number in suspects else message
            for number, message in enumerate(chat.messages)
        ]
        names = [_tool_name(tool) for tool in chat.tools or ()]
        try:
            output = self._apply_template(messages, False, chat.tools).lower() if suspects else ""
            if names and not (self._shows_tools and all(name in full_text for name in names)):
                template, _ = self._templates.choose(has_tools=True)
                self._shows_tools = (
                    self._apply_template(chat.messages, False, None, template) != full_text
                )
                self._counters.lost_tools += not self._shows_tools
        except TEMPLATE_ERRORS:
            return
        for number, sentinel in suspects.items():
            role = chat.messages[number]["role"]
            if sentinel.lower() in output:
                self._written_roles.add(role)
            else:
                self._counters.count_role("left_out", role)

    def _turn_tokens(self, special_tokens: Sequence[str]) -> set[str]:
        """Return the special tokens barred from answers: those around turns, and bos, eos, pad, ...

        All special tokens if the template renders no trial chat, or writes none of them in it.
        """
        named_tokens = {
            t for t in self._tokenizer.special_tokens_map.values() if isinstance(t, str)
        }
        for roles in _TRIAL_TURNS if self._templates else ():
            turns = [{"role": role, "content": SENTINEL} for role in roles]
            try:
                text = self._apply_template(turns, True, None)
            except TEMPLATE_ERRORS:
                continue
            turn_tokens = {token for token in special_tokens if token in text}
            return named_tokens | (turn_tokens or {*special_tokens})
        return {*special_tokens}

    def _select_all_except_unlearned(
        self, chat: Chat, answer_indices: list[int], answer_spans: list[AnswerSpans], full_text: str
    ) -> RenderedText | str:
        """Select all of a chat as learned text, except the answers marked as not learned.

        Answers with their own weights are learned with those weights.
        """
        learned_spans, weights, position = [], [], 0
        for number, spans in zip(answer_indices, answer_spans, strict=True):
            is_unlearned = number in chat.unlearned
            if not is_unlearned and number not in chat.weights:
                continue
            if not spans:
                kind = "is left out" if is_unlearned else "has a weight"
                return f"the chat template does not show where an answer that {kind} begins"
            span = spans[0][0], spans[-1][1]
            learned_spans.append((position, span[0]))
            weights.append(chat.weight)
            position = span[1]
            self._counters.marked_answers += is_unlearned
            if not is_unlearned:
                learned_spans.append(span)
                weights.append(chat.weights[number])
        learned_spans.append((position, len(full_text)))
        weights.append(chat.weight)
        return RenderedText(full_text, learned_spans, weights=_drop_weights_if_all_one(weights))

    def _render_plain(self, example: Completion) -> RenderedText | str:
        if not example.completion.strip():
            return "empty answer"
        system_text = f"{example.system}\n\n" if example.system else ""
        prompt = system_text + example.plain_prompt
        text = prompt + example.completion
        spans = None
        if self._loss_on == "answers":
            shift = len(system_text)
            spans = [(shift + start, shift + stop) for start, stop in example.plain_answers]
            spans.append((len(prompt), len(text)))
        weights = _drop_weights_if_all_one([example.weight] * (1 if spans is None else len(spans)))
        return RenderedText(text, spans, is_plain=True, bos=True, eos=True, weights=weights)

    def _apply_template(
        self,
        messages: Sequence[dict[str, Any]],
        include_generation_prompt: bool,
        tools: list[Any] | None,
        template: str | None = None,
    ) -> str:
        """Render messages; raises one of TEMPLATE_ERRORS if the template refuses them."""
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template or self._templates.choose(tools is not None)[0],
            add_generation_prompt=include_generation_prompt,
            tokenize=False,
        )
        return text


def find_answer_end_token(tokenizer: FastTokenizer) -> str | None:
    """Return the special token that a chat template writes after an answer; None without one."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    rendered = Renderer(tokenizer, "answers", Counters()).render(Chat(turns * 2))
    if isinstance(rendered, str) or not rendered.spans:
        return None
    answer = rendered.text[slice(*rendered.spans[0])]
    return next((c for c in list_special_tokens(tokenizer) if answer.endswith(c)), None)


def list_special_tokens(tokenizer: FastTokenizer) -> list[str]:
    """Return the special tokens of a tokenizer, as text."""
    added_tokens = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    special_tokens = {token.content for token in added_tokens if token.special}
    return sorted(filter(None, special_tokens | {*tokenizer.all_special_tokens}))


def _drop_weights_if_all_one(weights: Sequence[float]) -> tuple[float, ...]:
    """Return weights for ``RenderedText``: empty if all are 1."""
    return () if all(weight == 1 for weight in weights) else tuple(weights)


def _is_empty_answer(message: dict[str, Any], learned_text: str) -> bool:
    """Return whether an answer has no text, and ``learned_text`` no reasoning or calls of it."""
    text = (message.get("content") or "").rpartition(_END_OF_REASONING)[2].strip()
    other_parts = [_read_reasoning(message), *_called_tool_names(message)]
    return not (text or any(part and part in learned_text for part in other_parts))


def _called_tool_names(message: dict[str, Any]) -> list[str]:
    return [call.get("function", call)["name"] for call in message.get("tool_calls") or []]


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _is_reasoning_present(message: dict[str, Any], learned_text: str) -> bool:
    """Return whether the learned text has a reasoning block that is not in the data."""
    is_given = _END_OF_REASONING in (message.get("content") or "") or _read_reasoning(message)
    return _END_OF_REASONING in learned_text and not is_given


def _read_reasoning(message: dict[str, Any]) -> str:
    """Return the reasoning of an answer, from its own field or from a block before the text."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(message.get(name), str):
            return str(message[name]).strip()
    head, mark, _ = (message.get("content") or "").partition(_END_OF_REASONING)
    return head.removeprefix("<think>").strip() if mark else ""
