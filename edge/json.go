package main

import (
	"math"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// plainJSON writes messages as protojson does with EmitDefaultValues, at a third of its cost: that was half of what the
// edge did. It has what our protos have; for anything else it panics when the message is first met, as a test sees.
type plainJSON struct{ runtime.JSONPb }

const pageBytes = 16 << 10 // what a page of 20 has room in

// Marshal is for answers: a message, or a list or message that is one field of it.
func (p *plainJSON) Marshal(value any) ([]byte, error) {
	if message, ok := value.(proto.Message); ok {
		return appendMessage(make([]byte, 0, pageBytes), message.ProtoReflect()), nil
	}
	return p.JSONPb.Marshal(value)
}

// planned is a field with its key as it is written.
type planned struct {
	key     string
	field   protoreflect.FieldDescriptor
	kind    protoreflect.Kind
	isList  bool
	present bool // written only when it is set
}

var plans sync.Map // protoreflect.FullName → []planned

func planOf(of protoreflect.MessageDescriptor) []planned {
	if known, ok := plans.Load(of.FullName()); ok {
		return known.([]planned)
	}
	plan := make([]planned, of.Fields().Len())
	for i := range plan {
		f := of.Fields().Get(i)
		if f.IsMap() {
			panic("a map, which no message has had: " + string(f.FullName()))
		}
		plan[i] = planned{strconv.Quote(f.JSONName()) + ":", f, f.Kind(), f.IsList(), f.HasPresence()}
	}
	plans.Store(of.FullName(), plan)
	return plan
}

func appendMessage(out []byte, message protoreflect.Message) []byte {
	if moment, ok := message.Interface().(*timestamppb.Timestamp); ok {
		return appendTime(out, moment.AsTime())
	}
	out = append(out, '{')
	first := true
	for _, one := range planOf(message.Descriptor()) {
		if one.present && !message.Has(one.field) {
			continue
		}
		if !first {
			out = append(out, ',')
		}
		first = false
		out = append(out, one.key...)
		value := message.Get(one.field)
		if !one.isList {
			out = appendValue(out, one, value)
			continue
		}
		out = append(out, '[')
		list := value.List()
		for i := range list.Len() {
			if i > 0 {
				out = append(out, ',')
			}
			out = appendValue(out, one, list.Get(i))
		}
		out = append(out, ']')
	}
	return append(out, '}')
}

func appendValue(out []byte, of planned, value protoreflect.Value) []byte {
	switch of.kind {
	case protoreflect.StringKind:
		return appendString(out, value.String())
	case protoreflect.MessageKind:
		return appendMessage(out, value.Message())
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return append(strconv.AppendUint(append(out, '"'), value.Uint(), 10), '"')
	case protoreflect.Uint32Kind:
		return strconv.AppendUint(out, value.Uint(), 10)
	case protoreflect.Int32Kind:
		return strconv.AppendInt(out, value.Int(), 10)
	case protoreflect.BoolKind:
		return strconv.AppendBool(out, value.Bool())
	case protoreflect.DoubleKind:
		return appendDouble(out, value.Float())
	default:
		panic("a kind that no field has had: " + of.kind.String())
	}
}

func appendDouble(out []byte, number float64) []byte {
	switch {
	case math.IsNaN(number):
		return append(out, `"NaN"`...)
	case math.IsInf(number, 0):
		return append(out, strconv.Quote(strconv.FormatFloat(number, 'g', -1, 64)+"inity")...)
	}
	return strconv.AppendFloat(out, number, 'g', -1, 64)
}

// appendTime has as many digits of a second as are needed: 0, 3, 6 or 9.
func appendTime(out []byte, moment time.Time) []byte {
	layout := `"2006-01-02T15:04:05.000000000Z"`
	switch nanos := moment.Nanosecond(); {
	case nanos == 0:
		layout = `"2006-01-02T15:04:05Z"`
	case nanos%1_000_000 == 0:
		layout = `"2006-01-02T15:04:05.000Z"`
	case nanos%1_000 == 0:
		layout = `"2006-01-02T15:04:05.000000Z"`
	}
	return moment.UTC().AppendFormat(out, layout)
}

const hexDigits = "0123456789abcdef"

// appendString escapes what JSON must have escaped. gRPC has seen to it that it is UTF-8.
func appendString(out []byte, text string) []byte {
	out = append(out, '"')
	start := 0
	for i := 0; i < len(text); i++ {
		c := text[i]
		if c >= ' ' && c != '"' && c != '\\' && c < utf8.RuneSelf || c >= utf8.RuneSelf {
			continue
		}
		out = append(out, text[start:i]...)
		start = i + 1
		switch c {
		case '"', '\\':
			out = append(out, '\\', c)
		case '\n':
			out = append(out, '\\', 'n')
		default:
			out = append(out, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&0xf])
		}
	}
	return append(append(out, text[start:]...), '"')
}
