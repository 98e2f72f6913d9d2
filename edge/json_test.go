package main

import (
	"bytes"
	"encoding/json"
	"math"
	"reflect"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const awkward = "a\"b\\c/\n\t\x01\x7f<>&é 故 👩‍💻\u2028\u2029 end"

// filled sets every field of a message; of a oneof, the `pick`th.
func filled(message protoreflect.Message, pick, depth int) {
	if moment, ok := message.Interface().(*timestamppb.Timestamp); ok {
		moment.Seconds, moment.Nanos = 1_800_000_000, []int32{0, 5_000_000, 5_000, 5}[pick%4]
		return
	}
	fields := message.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if of := f.ContainingOneof(); of != nil && of.Fields().Get(pick%of.Fields().Len()) != f || depth > 5 {
			continue
		}
		if f.IsList() {
			list := message.Mutable(f).List()
			for range 2 {
				value := list.NewElement()
				if f.Message() != nil {
					filled(value.Message(), pick, depth+1)
				} else {
					value = sample(f, pick)
				}
				list.Append(value)
			}
		} else if f.Message() != nil {
			filled(message.Mutable(f).Message(), pick, depth+1)
		} else {
			message.Set(f, sample(f, pick))
		}
	}
}

func sample(f protoreflect.FieldDescriptor, pick int) protoreflect.Value {
	switch f.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(awkward)
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return protoreflect.ValueOfUint64(math.MaxUint64 - uint64(pick))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(math.MaxUint32)
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(math.MinInt32)
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	default:
		return protoreflect.ValueOfFloat64([]float64{0.1, 1e300, math.Inf(-1), math.NaN()}[pick%4])
	}
}

func same(t *testing.T, message proto.Message) {
	t.Helper()
	wanted, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(message)
	if err != nil {
		t.Fatal(err)
	}
	var one, other any
	numbers := json.NewDecoder(bytes.NewReader(wanted))
	numbers.UseNumber()
	got := appendMessage(nil, message.ProtoReflect())
	ours := json.NewDecoder(bytes.NewReader(got))
	ours.UseNumber()
	if numbers.Decode(&one) != nil || ours.Decode(&other) != nil || !reflect.DeepEqual(one, other) {
		t.Errorf("%s:\n%s\nshould be\n%s", message.ProtoReflect().Descriptor().FullName(), got, wanted)
	}
}

func TestAnswersAreWrittenAsProtojsonDoes(t *testing.T) {
	for _, r := range annotatedRoutes() {
		kind, err := protoregistry.GlobalTypes.FindMessageByName(r.rpc.Output().FullName())
		if err != nil {
			t.Fatal(err)
		}
		same(t, kind.New().Interface())
		for pick := range 4 {
			message := kind.New()
			filled(message, pick, 0)
			same(t, message.Interface())
		}
	}
}
