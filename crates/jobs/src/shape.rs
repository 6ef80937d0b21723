//! A fingerprint of a type's structure, by which a replay notices that a step's result has another one.

use serde::de::value::Error as NoValue;
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, EnumAccess, Error as _, MapAccess, SeqAccess, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use xxhash_rust::xxh3::xxh3_128;

/// How deep a type is looked at: one that contains itself has no end.
const DEPTH_MAX: u32 = 12;
/// How long a description may become.
const TEXT_MAX: usize = 16 << 10;

/// 32 hexadecimal digits. Names of fields and variants count, their order does not, nor does the name of the type.
pub(crate) fn shape_of<T: for<'de> Deserialize<'de>>() -> String {
    let mut text = String::new();
    // A type that refuses the made-up value, such as an address, is described as far as it was looked at.
    let _ = T::deserialize(Look { text: &mut text, depth: 0 });
    format!("{:032x}", xxh3_128(text.as_bytes()))
}

/// Answers every question of a type with a made-up value, and notes what was asked.
struct Look<'a> {
    text: &'a mut String,
    depth: u32,
}

impl<'a> Look<'a> {
    fn note(&mut self, what: &str) -> Result<(), NoValue> {
        if DEPTH_MAX < self.depth || TEXT_MAX < self.text.len() {
            return Err(NoValue::custom("deep enough"));
        }
        self.text.push_str(what);
        self.text.push(';');
        Ok(())
    }

    fn inner(&mut self) -> Look<'_> {
        Look { text: self.text, depth: self.depth + 1 }
    }
}

macro_rules! plain {
    ($($method:ident $visit:ident $value:expr),* $(,)?) => {
        $(fn $method<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, NoValue> {
            self.note(stringify!($method))?;
            visitor.$visit($value)
        })*
    };
}

impl<'de> Deserializer<'de> for Look<'_> {
    type Error = NoValue;

    plain!(
        deserialize_bool visit_bool false,
        deserialize_i8 visit_i8 0,
        deserialize_i16 visit_i16 0,
        deserialize_i32 visit_i32 0,
        deserialize_i64 visit_i64 0,
        deserialize_i128 visit_i128 0,
        deserialize_u8 visit_u8 0,
        deserialize_u16 visit_u16 0,
        deserialize_u32 visit_u32 0,
        deserialize_u64 visit_u64 0,
        deserialize_u128 visit_u128 0,
        deserialize_f32 visit_f32 0.0,
        deserialize_f64 visit_f64 0.0,
        deserialize_char visit_char 'a',
    );

    fn deserialize_unit<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, NoValue> {
        self.note("unit")?;
        visitor.visit_unit()
    }

    fn deserialize_any<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, NoValue> {
        self.note("any")?;
        visitor.visit_unit()
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoValue> {
        self.deserialize_any(visitor)
    }

    fn deserialize_str<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, NoValue> {
        self.note("str")?;
        visitor.visit_str("")
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoValue> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, NoValue> {
        self.note("bytes")?;
        visitor.visit_bytes(b"")
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoValue> {
        self.deserialize_bytes(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, NoValue> {
        self.note("option")?;
        if self.depth == DEPTH_MAX { visitor.visit_none() } else { visitor.visit_some(self.inner()) }
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, NoValue> {
        self.deserialize_unit(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, NoValue> {
        // JSON does not show it.
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, NoValue> {
        self.note("seq")?;
        let left = usize::from(self.depth < DEPTH_MAX);
        visitor.visit_seq(Items { look: self.inner(), left })
    }

    fn deserialize_tuple<V: Visitor<'de>>(mut self, len: usize, visitor: V) -> Result<V::Value, NoValue> {
        self.note(&format!("tuple {len}"))?;
        visitor.visit_seq(Items { look: self.inner(), left: len })
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self, _: &'static str, len: usize, visitor: V,
    ) -> Result<V::Value, NoValue> {
        self.deserialize_tuple(len, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, NoValue> {
        self.note("map")?;
        let left = usize::from(self.depth < DEPTH_MAX);
        visitor.visit_map(Entries { look: self.inner(), left })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        mut self, _: &'static str, fields: &'static [&'static str], visitor: V,
    ) -> Result<V::Value, NoValue> {
        let mut fields = fields.to_vec();
        fields.sort_unstable();
        self.note(&format!("struct {}", fields.join(",")))?;
        visitor.visit_map(Fields { look: self.inner(), fields })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        mut self, _: &'static str, variants: &'static [&'static str], visitor: V,
    ) -> Result<V::Value, NoValue> {
        let mut variants = variants.to_vec();
        variants.sort_unstable();
        self.note(&format!("enum {}", variants.join(",")))?;
        let first = *variants.first().ok_or_else(|| NoValue::custom("no variant"))?;
        visitor.visit_enum(Variant { look: self.inner(), name: first })
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoValue> {
        visitor.visit_str("")
    }
}

struct Items<'a> {
    look: Look<'a>,
    left: usize,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = NoValue;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, NoValue> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        let look = Look { text: self.look.text, depth: self.look.depth };
        seed.deserialize(look).map(Some)
    }
}

struct Entries<'a> {
    look: Look<'a>,
    left: usize,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = NoValue;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, NoValue> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        seed.deserialize(Look { text: self.look.text, depth: self.look.depth }).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, NoValue> {
        seed.deserialize(Look { text: self.look.text, depth: self.look.depth })
    }
}

struct Fields<'a> {
    look: Look<'a>,
    /// In descending order of use: the last one is the next.
    fields: Vec<&'static str>,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = NoValue;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, NoValue> {
        let Some(field) = self.fields.last() else { return Ok(None) };
        seed.deserialize(Name(field)).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, NoValue> {
        let field = self.fields.pop().unwrap_or_default();
        let mut look = Look { text: self.look.text, depth: self.look.depth };
        look.note(field)?;
        seed.deserialize(look)
    }
}

struct Name(&'static str);

impl<'de> Deserializer<'de> for Name {
    type Error = NoValue;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, NoValue> {
        visitor.visit_str(self.0)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

struct Variant<'a> {
    look: Look<'a>,
    name: &'static str,
}

impl<'de, 'a> EnumAccess<'de> for Variant<'a> {
    type Error = NoValue;
    type Variant = Look<'a>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Look<'a>), NoValue> {
        Ok((seed.deserialize(Name(self.name))?, self.look))
    }
}

impl<'de> VariantAccess<'de> for Look<'_> {
    type Error = NoValue;

    fn unit_variant(self) -> Result<(), NoValue> {
        Ok(())
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, NoValue> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, NoValue> {
        self.deserialize_tuple(len, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(self, fields: &'static [&'static str], visitor: V) -> Result<V::Value, NoValue> {
        self.deserialize_struct("", fields, visitor)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    #[allow(dead_code, reason = "only its structure is looked at")]
    struct Order {
        id: u64,
        lines: Vec<(String, f64)>,
    }

    #[derive(Deserialize)]
    #[allow(dead_code, reason = "only its structure is looked at")]
    struct Tree {
        children: Vec<Tree>,
        parent: Option<Box<Tree>>,
    }

    #[test]
    fn the_structure_counts_and_the_names_and_order_of_the_type_do_not() {
        #[derive(Deserialize)]
        #[allow(dead_code, reason = "only its structure is looked at")]
        struct Other {
            lines: Vec<(String, f64)>,
            id: u64,
        }
        #[derive(Deserialize)]
        #[allow(dead_code, reason = "only its structure is looked at")]
        struct Changed {
            id: u64,
            lines: Vec<(String, u64)>,
        }
        assert_eq!(shape_of::<Order>(), shape_of::<Other>());
        assert_ne!(shape_of::<Order>(), shape_of::<Changed>());
        assert_ne!(shape_of::<u64>(), shape_of::<i64>());
        assert_ne!(shape_of::<Option<u64>>(), shape_of::<u64>());
        assert_ne!(shape_of::<BTreeMap<String, u8>>(), shape_of::<Vec<u8>>());
        assert_eq!(shape_of::<Order>().len(), 32);
    }

    #[test]
    fn a_type_without_end_has_a_shape() {
        assert_eq!(shape_of::<Tree>(), shape_of::<Tree>());
        assert_ne!(shape_of::<Tree>(), shape_of::<Order>());
    }
}
