drop table {{schema}}.outbox_attempt;
drop table {{schema}}.outbox;
drop table {{schema}}.meta;
drop function {{schema}}.home();
