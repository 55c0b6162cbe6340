"""Acting: the rollouts of a policy, from the chat prompt to the closed attempt.

rollout         the rules of attempts, and the segmenter or player that drives them
explore         many attempts side by side: begun, moved on, forked for probes, closed
agent_loop      moves an attempt on:
segmenter_loop    turn by turn, as a segmenter defines turns
player_loop       from beginning to end, as a player likes
attempt         one attempt under way: its limits, its turns so far
agent           what all attempts of a collection share: model, tools, limits
conversation    one token history at an engine, or one list of messages at an endpoint
chat            token-exact chat: rendered once, then only appended to
messages        chat messages in one form
templates       the bundled chat templates, and what any template does besides writing messages
toolbox         tool calls checked, run within a time limit, made safe to show
batches         calls of one toolset that arrive together
capacity        the number of attempts that sampler and tools can serve at a time
json_call       a tool call read from JSON that a policy wrote
mistakes        exceptions of a tool: the policy's mistake, or the world's fault
functions       a typed function described as a tool
function_tools  the tool that it becomes
parts           lists of components in which functions may stand
running         the event loop of all collections, and other people's code in threads
"""
