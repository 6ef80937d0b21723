//! A push request: JSON ─► groups by partition, or the item and field that is wrong.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use serde::Deserialize;
use serde::de::{Deserializer, Visitor};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::bundle::{Group, Message};
use crate::error::Error;
use crate::http::body::checked_depth;
use crate::http::json::{self, Object};
use crate::http::message::present;
use crate::id::{DEFAULT_PARTITION, HASH_BYTES, PartitionName, checked_name, checked_transaction_id};
use crate::segment::hash;

/// Where the outcome of an item is found.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) group: usize,
    pub(super) position: usize,
    /// Not a repetition of an earlier item of this request.
    pub(super) is_first: bool,
    pub(super) transaction_id: Option<String>,
}

#[derive(Debug)]
pub(super) struct Push {
    pub(super) groups: Vec<Group>,
    /// One an item, in request order.
    pub(super) places: Vec<Place>,
}

/// What to push.
#[derive(Deserialize, ToSchema)]
#[schema(as = Push)]
pub(super) struct Body<'a> {
    #[serde(borrow)]
    #[schema(value_type = Vec<Item<'a>>, required)]
    items: Option<Vec<Object<Item<'a>>>>,
}

/// A message.
#[derive(Deserialize, ToSchema)]
#[schema(as = PushItem)]
#[serde(rename_all = "camelCase")]
struct Item<'a> {
    #[serde(borrow)]
    #[schema(value_type = String, required, min_length = 1, max_length = 255)]
    queue: Option<Text<'a>>,
    #[serde(borrow)]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255, default = "Default")]
    partition: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "present")]
    #[schema(value_type = serde_json::Value, required)]
    payload: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 65_535)]
    transaction_id: Option<Text<'a>>,
    #[serde(borrow)]
    #[schema(value_type = Option<String>)]
    trace_id: Option<Text<'a>>,
}

/// Text that is borrowed unless it holds escapes; inside an `Option`, a plain `Cow` never is.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;

        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E: serde::de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }

        deserializer.deserialize_str(TextVisitor)
    }
}

impl Push {
    /// # Errors
    /// [`Error::BadBody`] if it is not the JSON of a push, [`Error::Invalid`] naming the item and the field.
    pub(super) fn parse(body: &Bytes, producer: Option<Arc<str>>) -> Result<Self, Error> {
        let Body { items } = json::read(body)?;
        let items = items.ok_or_else(|| Error::invalid("items", "is required"))?;
        let mut grouping =
            Grouping { body, producer, groups: Vec::new(), by_name: HashMap::new(), seen: HashMap::new() };
        let mut places = Vec::with_capacity(items.len());
        for (index, Object(item)) in items.into_iter().enumerate() {
            places.push(grouping.add(item).map_err(|error| in_item(index, error))?);
        }
        Ok(Self { groups: grouping.groups, places })
    }
}

fn in_item(index: usize, error: Error) -> Error {
    match error {
        Error::Invalid { field, reason } => Error::invalid("items", format!("[{index}].{field}: {reason}")),
        other => other,
    }
}

struct Grouping<'a> {
    body: &'a Bytes,
    producer: Option<Arc<str>>,
    groups: Vec<Group>,
    by_name: HashMap<(Cow<'a, str>, Cow<'a, str>), usize>,
    /// Group, hash of the transaction id ─► position in the group.
    seen: HashMap<(usize, [u8; HASH_BYTES]), usize>,
}

impl<'a> Grouping<'a> {
    fn add(&mut self, item: Item<'a>) -> Result<Place, Error> {
        let Item { queue, partition, payload, transaction_id, trace_id } = item;
        let queue = queue.ok_or_else(|| Error::invalid("queue", "is required"))?.0;
        checked_name("queue", &queue)?;
        let partition = partition.map_or(Cow::Borrowed(DEFAULT_PARTITION), |partition| partition.0);
        checked_name("partition", &partition)?;
        let payload = payload.ok_or_else(|| Error::invalid("payload", "is required"))?.get();
        checked_depth("payload", payload)?;
        let transaction_id = transaction_id.map(|id| id.0.into_owned());
        if let Some(id) = &transaction_id {
            checked_transaction_id("transactionId", id)?;
        }
        let group = self.group(queue, partition);
        let position = self.groups[group].messages.len();
        if let Some(id) = &transaction_id {
            match self.seen.entry((group, hash(id))) {
                Entry::Occupied(first) => {
                    return Ok(Place { group, position: *first.get(), is_first: false, transaction_id });
                }
                Entry::Vacant(place) => place.insert(position),
            };
        }
        // The wire lets a producer send any text as a trace id; only a UUID is one.
        let trace_id = trace_id.and_then(|text| Uuid::parse_str(&text.0).ok());
        let payload = self.body.slice_ref(payload.as_bytes());
        self.groups[group].messages.push(Message {
            id: None,
            transaction_id: transaction_id.clone(),
            trace_id,
            producer: self.producer.clone(),
            payload,
        });
        Ok(Place { group, position, is_first: true, transaction_id })
    }

    fn group(&mut self, queue: Cow<'a, str>, partition: Cow<'a, str>) -> usize {
        match self.by_name.entry((queue, partition)) {
            Entry::Occupied(group) => *group.get(),
            Entry::Vacant(place) => {
                let name = PartitionName::new(&place.key().0, &place.key().1);
                self.groups.push(Group { name, messages: Vec::new() });
                *place.insert(self.groups.len() - 1)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Push, Error> {
        Push::parse(&Bytes::copy_from_slice(text.as_bytes()), None)
    }

    #[test]
    fn items_are_grouped_by_partition_in_request_order() {
        let push = parse(
            r#"{"items":[{"queue":"q","payload":1},{"queue":"q","partition":"p","payload":2,"transactionId":"t"},
                {"queue":"q","payload":3},{"queue":"q","partition":"p","payload":4,"transactionId":"t"}],"more":[{}]}"#,
        )
        .expect("valid");
        let names: Vec<&str> = push.groups.iter().map(|group| group.name.partition()).collect();
        assert_eq!(names, [DEFAULT_PARTITION, "p"]);
        let places: Vec<_> = push.places.iter().map(|p| (p.group, p.position, p.is_first)).collect();
        assert_eq!(places, [(0, 0, true), (1, 0, true), (0, 1, true), (1, 0, false)]);
        assert_eq!(push.groups[1].messages.len(), 1, "the repetition is not stored");
    }

    #[test]
    fn payload_bytes_are_the_ones_that_were_sent() {
        for payload in ["null", "1.0e+07", r#"{"b":1,"a":"\u0000\ud800"}"#, "[ 1 ,2]", "123456789012345678901234567890"]
        {
            let push = parse(&format!(r#"{{"items":[{{"payload": {payload} ,"queue":"q"}}]}}"#)).expect("valid");
            assert_eq!(push.groups[0].messages[0].payload, payload);
        }
    }

    #[test]
    fn mistakes_name_the_item_and_the_field() {
        for (item, field) in [
            (r#"{"payload":1}"#, "queue"),
            (r#"{"queue":"q"}"#, "payload"),
            (r#"{"queue":"","payload":1}"#, "queue"),
            (r#"{"queue":"q","payload":1,"partition":"a\u001fb"}"#, "partition"),
            (r#"{"queue":"q","payload":1,"transactionId":"\u0000"}"#, "transactionId"),
        ] {
            let error = parse(&format!(r#"{{"items":[{{"queue":"q","payload":1}},{item}]}}"#)).expect_err(item);
            let text = error.to_string();
            assert!(text.contains("[1]") && text.contains(field), "{text}");
        }
        let error = parse(r#"{"items":[{"queue":7,"payload":1}]}"#).expect_err("not text").to_string();
        assert!(error.contains("items[0].queue: "), "{error}");
        assert!(parse("{}").expect_err("no items").to_string().contains("items"));
        assert!(parse(r#"{"items":[{"queue":"\ud800","payload":1}]}"#).is_err(), "a name is whole text");
    }

    #[test]
    fn a_payload_nests_at_most_128_deep() {
        let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert!(parse(&format!(r#"{{"items":[{{"queue":"q","payload":{}}}]}}"#, deep(129))).is_err());
        assert!(parse(&format!(r#"{{"items":[{{"queue":"q","payload":{}}}]}}"#, deep(128))).is_ok());
    }

    #[test]
    fn a_trace_id_is_kept_if_it_is_one() {
        let item = |id: &str| format!(r#"{{"items":[{{"queue":"q","payload":1,"traceId":{id}}}]}}"#);
        let trace = |id: &str| parse(&item(id)).expect("valid").groups[0].messages[0].trace_id;
        assert_eq!(trace(r#""00000000-0000-4000-8000-000000000001""#).map(|id| id.as_u128() & 0xF), Some(1));
        assert_eq!(trace(r#""other""#), None);
        assert_eq!(trace("null"), None);
    }
}
